"""Loads of adapters answered straight from their connection: in every way as the application answers them."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from fast_requests import Pair, paired
from moelet.service.direct_loads import LONGEST, LONGEST_BODY, REMEMBERED, DirectLoad, DirectLoads
from moelet.service.keys import Keys
from moelet.service.request_id import MadeIds
from raw_http import LAST, answered, connected
from running_service import MAX_BODY_BYTES, OpenEngine, RunningService


def put(name: str, *lines: bytes, body: bytes | None = None, **fields: Any) -> bytes:
    """A whole load, with ``fields`` as its JSON unless there is a ``body``, and ``lines`` among its headers."""
    content = json.dumps(fields).encode() if body is None else body
    said = [b"PUT /v1/adapters/%b HTTP/1.1" % name.encode(), b"Host: x", b"Content-Length: %d" % len(content), *lines]
    return b"\r\n".join([*said, b"", b""]) + content


TAKEN: dict[str, tuple[int, bytes]] = {
    "usual": (200, put("a", path="good")),
    "pinned": (200, put("a", path="good", pinned=True)),
    "a path with dots, other fields": (200, put("a", path="./good/../good", more=1)),
    "request id": (200, put("a", b"X-Request-Id: mine", path="good")),
    "no folder": (404, put("a", path="absent")),
    "no config": (404, put("a", path="empty")),
    "refused": (400, put("a", path="dora")),
    "truncated": (400, put("a", path="truncated")),
    "outside": (403, put("a", path="/etc")),
    "a link out": (403, put("a", path="linked_weights")),
    "empty path": (400, put("a", path="")),
    "NUL": (400, put("a", path="a\0b")),
    "too long for a file system": (404, put("a", path="x" * 5000)),
    "too long for any": (400, put("a", path="x/" * 20000)),
}
"""Loads that are begun on the way past the application."""

LEFT: dict[str, tuple[int, bytes]] = {
    "no JSON": (400, put("a", body=b"{")),
    "no body": (400, put("a", body=b"")),
    "no path": (400, put("a", pinned=True)),
    "path of another kind": (400, put("a", path=1)),
    "pin of another kind": (400, put("a", path="good", pinned="yes")),
    "half a character": (400, put("a", body=b'{"path": "\\ud800"}')),
    "no name": (404, put("", path="good")),
    "name with a slash": (404, put("a/b", path="good")),
    "name that is none": (400, put(".a", path="good")),
    "name too long": (400, put("a" * 129, path="good")),
    "escape": (200, put("%61", path="good")),
    "query": (200, put("a?b", path="good")),
    "gzip sent": (400, put("a", b"Content-Encoding: gzip", path="good")),
    "a coding that is not known": (415, put("a", b"Content-Encoding: br", path="good")),
    "long body": (200, put("a", path="good", more="x" * LONGEST_BODY)),
    "long head": (200, put("a", b"A: " + b"b" * LONGEST, path="good")),
    "other method": (405, put("a", path="good").replace(b"PUT", b"POST", 1)),
}
"""Requests that the application answers."""


@pytest.fixture(scope="module")
def begun() -> Iterator[list[bool]]:
    """Of each load that came whole on the way past the application, whether it was begun there."""
    begin, noted = DirectLoad.begin, list[bool]()

    def noting(self: DirectLoad, *arguments: Any) -> Any:
        loading = begin(self, *arguments)
        noted.append(loading is not None)
        return loading

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DirectLoad, "begin", noting)
        yield noted


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, adapter_root: Path, begun: list[bool]) -> Iterator[Pair]:
    begun.clear()  # what other tests began, wherever this one's turn comes
    with paired(open_engine, adapter_root) as pair:
        yield pair


def loads(service: RunningService) -> dict[str, float]:
    """Loads by what they came to."""
    outcomes = ("ok", "invalid", "rejected", "failed", "cancelled")
    return {outcome: service.metric("moelet_adapter_loads_total", outcome=outcome) for outcome in outcomes}


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_every_byte_of_an_answer_is_the_application_s(pair: Pair, begun: list[bool], name: str) -> None:
    begun.clear()
    expected, sent = {**TAKEN, **LEFT}[name]
    first, second, _ = pair.same(sent, sent, LAST)
    assert (first[0], second[0]) == (expected, expected)
    assert begun == ([True, True] if name in TAKEN else [False] * len(begun))
    assert loads(pair.fast) == loads(pair.slow)
    assert pair.fast.records() == pair.slow.records()


def test_a_body_of_unknown_coding_is_the_client_s_fault_and_it_is_told_of_others(pair: Pair) -> None:
    before = [loads(service)["invalid"] for service in (pair.fast, pair.slow)]
    [(status, headers, body), *_] = pair.same(put("a", b"Content-Encoding: br", path="good"), LAST)
    assert (status, headers["accept-encoding"]) == (415, "gzip, deflate")
    assert json.loads(body)["error"]["type"] == "UnsupportedMediaTypeError"
    assert [loads(service)["invalid"] for service in (pair.fast, pair.slow)] == [count + 1 for count in before]


def test_a_new_name_is_created_and_a_replaced_one_s_pin_kept(pair: Pair) -> None:
    for service in (pair.fast, pair.slow):
        service.unload_all()
    said = pair.same(put("new", path="good", pinned=True), put("new", path="good"), LAST)
    records = [json.loads(body) for _, _, body in said[:2]]
    assert [status for status, *_ in said[:2]] == [201, 200]
    assert [(record["version"], record["pinned"]) for record in records] == [(1, True), (2, True)]


def test_keys_are_asked_for(open_engine: OpenEngine, adapter_root: Path, begun: list[bool]) -> None:
    begun.clear()
    sent = [put("k", b"Authorization: Bearer %b" % key, path="good") for key in (b"user", b"admin", b"none")]
    with paired(open_engine, None, more_roots=[adapter_root], keys=Keys(["user"], "admin")) as pair:
        said = pair.same(*sent, put("k", path="good"), LAST)
    assert [status for status, *_ in said[:4]] == [403, 201, 401, 401]
    assert begun == [True]


def test_a_client_that_leaves_has_its_adapter_loaded(
    open_engine: OpenEngine, adapter_root: Path, begun: list[bool]
) -> None:
    begun.clear()
    with paired(open_engine, adapter_root) as pair:
        for service in (pair.fast, pair.slow):
            with connected(service) as client:
                client.sendall(put("left", path="good"))
            eventually(lambda it=service: "left" in it.service.adapters.in_flight_by_name())
        eventually(pair.settled)
    assert begun == [True]


def test_what_comes_behind_a_load_waits_for_its_answer(pair: Pair) -> None:
    gone = b"DELETE /v1/adapters/behind HTTP/1.1\r\nHost: x\r\n\r\n"
    said = pair.same(put("behind", path="good") + gone + put("behind", path="good") + LAST)
    assert [status for status, *_ in said[:3]] == [201, 200, 201]


def test_a_service_that_drains_loads_nothing(open_engine: OpenEngine, adapter_root: Path, begun: list[bool]) -> None:
    begun.clear()
    with paired(open_engine, None, more_roots=[adapter_root]) as pair:
        for service in (pair.fast, pair.slow):
            service.service.lifecycle.draining = True
        [(status, headers, _), *_] = pair.same(put("a", path="good"), LAST)
        assert (status, headers["retry-after"], begun) == (503, "1", [True])
        assert loads(pair.fast) == loads(pair.slow)


def test_a_fault_of_ours_tells_nothing_of_the_inside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for service in (pair.fast, pair.slow):
        monkeypatch.setattr(service.service.adapters, "record", lambda _version: {}["secret"])
    with caplog.at_level(logging.ERROR):
        [(status, _, body), *_] = pair.same(put("a", path="good"), LAST)
    assert status == 500
    assert b"secret" not in body
    assert [record.getMessage() for record in caplog.records] == ["PUT /v1/adapters/a failed"] * 2


def test_the_log_has_the_same_lines(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def lines(service: RunningService) -> list[Any]:
        caplog.clear()
        with connected(service) as client:
            for sent in (put("logged", b"X-Request-Id: mine", path="good"), put("logged", path="absent")):
                answered(client, sent)

        def said() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.name in ("moelet.access", "moelet.service.adapters")]

        eventually(lambda: len(said()) == 3)
        fields = [{**record.fields, "ms": 0} for record in said() if hasattr(record, "fields")]
        texts = [record.getMessage() for record in said() if not hasattr(record, "fields")]
        return [sorted(map(str, fields)), texts]

    for service in (pair.fast, pair.slow):
        service.client.delete("/v1/adapters/logged")
    with caplog.at_level(logging.DEBUG, "moelet"):
        expected = lines(pair.slow)
        assert lines(pair.fast) == expected
    assert expected[1][0].startswith("loaded adapter logged, version 1, from /")


def test_few_heads_are_remembered_and_none_that_is_refused(pair: Pair) -> None:
    known = DirectLoads(pair.fast.service, Keys(["user"]), MadeIds(), MAX_BODY_BYTES)
    key = b"Authorization: Bearer user"
    for i in range(2 * REMEMBERED):
        assert known.find(put(f"a{i}", key, body=b"")[:-4] + b"\r\nContent-Length: 5\r\n\r\n") is None
        assert known.find(_head(put(f"a{i}", key, path="good"))) is not None
        assert known.find(_head(put(f"a{i}", path="good"))) is None
    assert known.find(_head(put("a", key, b"A: " + b"a" * LONGEST, path="good"))) is None
    assert known._remembered.cache_info().currsize == REMEMBERED


def test_a_load_of_a_folder_that_went_is_told_of_by_the_client_s_path(pair: Pair, adapter_root: Path) -> None:
    shutil.copytree(adapter_root / "good", adapter_root / "going")
    sent = put("going", path="going")
    pair.same(sent, LAST)
    shutil.rmtree(adapter_root / "going")
    [(status, _, body), *_] = pair.same(sent, LAST)
    assert status == 404
    assert json.loads(body)["error"]["message"] == "no adapter found at going: there is no such folder"
    assert pair.fast.client.get("/v1/adapters/going").json()["version"] == 1


def _head(sent: bytes) -> bytes:
    return sent[: sent.index(b"\r\n\r\n") + 4]


def test_answers_are_whole_on_asyncio_s_own_loop(open_engine: OpenEngine, adapter_root: Path) -> None:
    with paired(open_engine, None, more_roots=[adapter_root], loop="asyncio") as pair:
        said = pair.same(put("a", path="good") * 3 + put("a", path="absent") + LAST)
    assert [status for status, *_ in said[:4]] == [201, 200, 200, 404]
