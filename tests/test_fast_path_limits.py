"""What inferences answered straight from their connection may cost and who may send them: keys, memory, counts, log."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from eventually import eventually
from fast_requests import Pair, asking, head, paired
from moelet.service.keys import Keys
from moelet.service.request_id import MadeIds
from moelet.service.v2.direct import LONGEST, REMEMBERED, DirectInferences
from moelet.service.v2.inference import Inferences
from raw_http import LAST, answered, connected, until_closed
from running_service import MAX_BODY_BYTES, OpenEngine, RunningService

USER, OTHER, ADMIN = "user-key", "user-kez", "admin-key"


def bearing(*keys: str, scheme: str = "Bearer") -> bytes:
    return asking(1, *[f"Authorization: {scheme} {key}".encode() for key in keys])


@pytest.fixture(scope="module")
def locked(open_engine: OpenEngine) -> Iterator[Pair]:
    with paired(open_engine, None, keys=Keys([USER], ADMIN)) as pair:
        yield pair


@pytest.fixture
def alone(open_engine: OpenEngine, tmp_path: Any) -> Iterator[Pair]:
    """Two that nobody else speaks to."""
    with paired(open_engine, tmp_path) as pair:
        yield pair


def test_a_head_that_is_known_opens_for_no_other_key(locked: Pair) -> None:
    """The right key goes past the application, again and again, and all others to it, with the same head otherwise."""
    right = bearing(USER)
    wrong = [bearing(OTHER), bearing(""), asking(1), bearing(USER, USER), bearing(USER, scheme="Basic")]
    wrong += [bearing(USER + " x"), bearing(ADMIN, OTHER)]
    for sent in wrong:
        assert [status for status, *_ in locked.same(right, right, LAST)] == [200] * 3
        assert set(locked.begun) == {True}
        assert [status for status, *_ in locked.same_behind(sent, right + LAST)] == [401, 200, 200]
        assert locked.begun == [True]
    for sent in (bearing(ADMIN), bearing(USER, scheme="bearer"), bearing(f"  {USER} ")):
        assert [status for status, *_ in locked.same(sent, LAST)] == [200, 200]
        assert locked.begun == [True]


def test_a_key_of_one_request_is_not_that_of_the_next(locked: Pair) -> None:
    assert [status for status, *_ in locked.same(bearing(USER) + asking(1) + bearing(USER) + LAST)] == [
        200,
        401,
        200,
        200,
    ]


def test_few_heads_are_remembered_and_none_that_is_refused(alone: Pair) -> None:
    service = alone.fast.service
    inferences = Inferences(service, MAX_BODY_BYTES)
    known = DirectInferences(service, inferences, Keys([USER]), MadeIds(), MAX_BODY_BYTES)
    key = b"Authorization: Bearer user-key"
    for i in range(3 * REMEMBERED):
        assert known.find(head(5, key, b"A: %d" % i)) is not None
        assert known.find(head(5, b"A: %d" % i)) is None
    assert known.find(head(5, key, b"A: " + b"a" * LONGEST)) is None
    assert known._remembered.cache_info().currsize == REMEMBERED
    again = head(5, key, b"A: 1")
    assert known.find(again) is known.find(again)


def test_what_comes_behind_a_request_is_kept_to_an_end(alone: Pair) -> None:
    with connected(alone.fast, 2) as client:
        with alone.fast.engine.closed():
            client.sendall(asking(1))
            assert alone.fast.engine.waiting.wait(10)
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):  # noqa: PT012 - whichever of the many sends it is
                for _ in range(32):
                    client.sendall(bytes(1 << 20))
        client.settimeout(10)
        assert until_closed(client).startswith(b"HTTP/1.1 200")


class Noted(uvicorn.Server):
    """A server that can be looked at."""

    made: list["Noted"]

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.made.append(self)


def test_connections_and_requests_are_counted_and_nothing_is_kept(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Noted.made = []
    monkeypatch.setattr(uvicorn, "Server", Noted)
    with paired(open_engine, None) as pair, connected(pair.fast) as client, connected(pair.slow) as other:
        for sent in (asking(1), asking(5000), asking(0), asking(1, b"Accept-Encoding: gzip"), asking(3)):
            answered(client, sent)
            answered(other, sent)
        fast, slow = (server.server_state for server in Noted.made)
        eventually(lambda: fast.total_requests == slow.total_requests == 5)
        [connection], [_] = fast.connections, slow.connections
        kept: Any = connection
        assert (kept._known, kept._body, kept._begun, bytes(kept._held)) == (None, None, None, b"")
        client.close()
        eventually(lambda: not fast.connections)
        assert not fast.tasks


def lines(caplog: pytest.LogCaptureFixture, act: Callable[[], object], count: int) -> list[dict[str, Any]]:
    """The lines of ``count`` requests that ``act`` brings into the access log, less their times."""
    caplog.clear()
    act()

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "moelet.access"]

    eventually(lambda: len(found()) == count)
    return [{**record.fields, "ms": type(record.fields["ms"])} for record in found()]  # type: ignore[attr-defined]


def test_the_log_has_the_same_lines(alone: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Of requests that are answered, that are wrong, and whose clients leave, the body there or not."""
    unknown = asking(2, parameters={"adapter": "none"})

    def speak(service: RunningService) -> None:
        with connected(service) as client:
            for sent in (asking(3), unknown, asking(0)):
                answered(client, sent)
            client.sendall(asking(1)[:-5])
        with service.engine.closed():
            with connected(service) as client:
                client.sendall(asking(4))
                assert service.engine.waiting.wait(10)
            eventually(lambda: service.service.lifecycle.in_flight == 0)

    def said(service: RunningService) -> list[dict[str, Any]]:
        found = lines(caplog, lambda: speak(service), 5)
        return sorted(found, key=lambda line: (line["tokens"], line["status"]))

    with caplog.at_level(logging.DEBUG, "moelet.access"):
        expected = said(alone.slow)
        assert said(alone.fast) == expected
    assert [(line["status"], line["tokens"]) for line in expected] == [(0, 0), (200, 0), (404, 2), (200, 3), (0, 4)]
