"""Slow, endless and countless clients over bare sockets: each is ended in time, and nobody else notices."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from moelet.service import connection_limits
from moelet.service.connection_limits import connections_allowed
from moelet.service.protocol import MAX_HEAD_BYTES, MAX_HEADERS
from raw_http import LAST, answers, connected, spoken, until_closed
from running_service import HIDDEN, OpenEngine, RunningService, hidden_states, running

TIMEOUT_S, KEEP_ALIVE_S = 0.8, 1
FORWARD = b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def hasty(open_engine: OpenEngine) -> Iterator[RunningService]:
    """A service that waits for nothing long."""
    with running(open_engine, None, body_timeout_s=TIMEOUT_S, keep_alive_s=KEEP_ALIVE_S) as service:
        yield service


def forward(num_tokens: int) -> bytes:
    body = json.dumps({"hidden_states": hidden_states(num_tokens).tolist()}).encode()
    return FORWARD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def drip(client: socket.socket, piece: bytes, until: Callable[[], bool]) -> None:
    while not until():
        try:
            client.sendall(piece)
        except OSError:
            return
        time.sleep(0.05)


STARTS = {
    "nothing": (b"", b""),
    "blank lines": (b"\r\n", b"\r\n"),
    "half a request line": (b"GET /rea", b"d"),
    "half a head": (b"GET /ready HTTP/1.1\r\nHost: x\r\nA: b", b"c"),
    "header after header": (b"GET /ready HTTP/1.1\r\nHost: x\r\n", b"A: b\r\n"),
    "half a body": (FORWARD + b"Content-Length: 100000\r\n\r\n{", b" "),
    "half a chunk": (FORWARD + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n{", b" "),
    "chunk after chunk": (FORWARD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "trailer after trailer": (FORWARD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
    "a body for nobody": (b"GET /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{", b" "),
}


@pytest.mark.parametrize("draining", [False, True])
def test_what_is_sent_by_halves_or_by_drips_ends(open_engine: OpenEngine, draining: bool) -> None:
    """All kinds at once, each stopping half way and dripping on, beside requests that are answered as ever."""
    with (
        running(open_engine, None, body_timeout_s=TIMEOUT_S, keep_alive_s=KEEP_ALIVE_S) as service,
        ExitStack() as open_,
    ):
        if draining:
            service.service.lifecycle.begin_drain()
        ended = threading.Event()
        pool = open_.enter_context(ThreadPoolExecutor(2 * len(STARTS)))
        open_.callback(ended.set)
        kinds = [(name, drips) for name in STARTS for drips in (False, True)]
        clients = {kind: open_.enter_context(connected(service, 20)) for kind in kinds}
        started = time.monotonic()
        for (name, drips), client in clients.items():
            client.sendall(STARTS[name][0])
            if drips:
                pool.submit(drip, client, STARTS[name][1], ended.is_set)
        assert service.client.get("/health").status_code == 200
        for (name, _), client in clients.items():
            early = [status for status, *_ in answers(until_closed(client))]
            assert early in ([], [404] if name == "a body for nobody" else [503] if draining else []), name
        assert time.monotonic() - started >= TIMEOUT_S
        assert service.client.get("/health").status_code == 200
        assert service.metric("moelet_requests_in_flight") == 0


@pytest.mark.parametrize("piece", [b"", b"\r\n"])
def test_a_connection_that_no_request_is_on_ends(hasty: RunningService, piece: bytes) -> None:
    with connected(hasty) as client, ThreadPoolExecutor() as pool:
        client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        started = time.monotonic()
        ended = threading.Event()
        if piece:
            pool.submit(drip, client, piece, ended.is_set)
        assert [status for status, *_ in answers(until_closed(client))] == [200]
        ended.set()
        assert time.monotonic() - started >= KEEP_ALIVE_S / 2


def test_a_request_in_slow_pieces_that_ends_in_time_is_answered(hasty: RunningService) -> None:
    def slowly() -> Iterator[bytes]:
        sent = forward(2)
        size = -(-len(sent) // 10)
        for start in range(0, len(sent), size):
            yield sent[start : start + size]
            time.sleep(TIMEOUT_S / 40)
        yield LAST

    assert [status for status, *_ in answers(spoken(hasty, slowly()))] == [200, 200]


def test_the_time_that_an_answer_takes_is_not_the_client_s(hasty: RunningService) -> None:
    """Neither that of a request alone, nor that of one behind which another, or half of it, has come."""
    half_a_body = FORWARD + b"Content-Length: 1\r\n\r\n"
    cases = ((b"", LAST, [200]), (b"GET /re", LAST[7:], [200]), (half_a_body, b"x" + LAST, [400, 200]))
    with ExitStack() as open_:
        clients = [open_.enter_context(connected(hasty)) for _ in cases]
        with hasty.engine.closed():
            for client, (behind, _, _) in zip(clients, cases, strict=True):
                client.sendall(forward(1) + behind)
            assert hasty.engine.waiting.wait(5)
            time.sleep(TIMEOUT_S + KEEP_ALIVE_S + 0.2)
        for client, (_, rest, statuses) in zip(clients, cases, strict=True):
            assert client.recv(12) == b"HTTP/1.1 200"
            client.sendall(rest)
            said = [status for status, *_ in answers(b"HTTP/1.1 200" + until_closed(client))]
            assert said == [200, *statuses]


def test_an_answer_that_is_due_is_never_replaced_by_a_refusal(
    hasty: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(hasty) as client, hasty.engine.closed():
        client.sendall(forward(1) + b"garbage\r\n\r\n")
        assert until_closed(client) == b""
    assert hasty.client.get("/ready").status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_leaves_behind_several_requests_leaves_all_of_them(
    hasty: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = {"layer": "1", "outcome": "cancelled"}
    deadline = time.monotonic() + 20
    while hasty.metric("moelet_requests_in_flight"):
        assert time.monotonic() < deadline
    before, forwards = hasty.metric("moelet_requests_total", **cancelled), hasty.engine.forwards
    with hasty.engine.closed(), connected(hasty) as other:
        other.sendall(forward(1))
        assert hasty.engine.waiting.wait(5)
        with connected(hasty) as client:
            client.sendall(forward(1) + b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            while hasty.metric("moelet_queue_requests") == 0:
                assert time.monotonic() < deadline
        while hasty.metric("moelet_requests_total", **cancelled) == before:
            assert time.monotonic() < deadline
    assert hasty.output(hidden_states=hidden_states(1)).shape == (1, HIDDEN)
    assert hasty.engine.forwards == forwards + 2
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_requests_in_one_piece_are_answered_in_order(hasty: RunningService) -> None:
    asked = [b"/ready", b"/nothing", b"/v1/models"] * 200
    sent = b"".join(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in asked) + LAST
    said = answers(spoken(hasty, iter([sent])))
    assert [status for status, *_ in said] == [200, 404, 200] * 200 + [200]
    assert len({headers["x-request-id"] for _, headers, _ in said}) == len(said)


@pytest.mark.parametrize(("count", "status"), [(MAX_HEADERS, 200), (MAX_HEADERS + 1, 431), (10 * MAX_HEADERS, 431)])
def test_headers_are_counted(hasty: RunningService, count: int, status: int) -> None:
    lines = b"".join(b"A%d: b\r\n" % i for i in range(count - 2))
    sent = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n"
    [(said, headers, body)] = answers(spoken(hasty, iter([sent])))
    assert (said, headers["connection"]) == (status, "close")
    if status == 431:
        assert str(MAX_HEADERS) in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"0\r\n", b"A: " + b"b" * 5000 + b"\r\n"),
        (b"0\r\nA: ", b"b" * 5000),
        (b"1;a=", b"b" * 5000),
    ],
)
def test_what_is_neither_head_nor_body_has_an_end(hasty: RunningService, start: bytes, piece: bytes) -> None:
    """Trailers and the extensions of chunks, which bring nothing."""

    def endless() -> Iterator[bytes]:
        yield FORWARD + b"Transfer-Encoding: chunked\r\n\r\n" + start
        for _ in range(1000 * MAX_HEAD_BYTES // len(piece)):
            yield piece

    said = spoken(hasty, endless())
    assert [status for status, *_ in answers(said)] in ([431], [])  # the refusal may be lost in what is sent still


def test_a_body_in_the_smallest_of_chunks_is_read(hasty: RunningService) -> None:
    body = json.dumps({"hidden_states": hidden_states(20).tolist()}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nX-Request-Id: late\r\n\r\n"
    sent = FORWARD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LAST
    first, last = answers(spoken(hasty, iter([sent])))
    assert (first[0], last[0]) == (200, 200)
    assert first[1]["x-request-id"] != "late"
    got = torch.tensor(json.loads(first[2])["hidden_states"])
    assert torch.equal(got, hasty.output(hidden_states=hidden_states(20)))


def test_a_client_that_takes_nothing_of_its_answers_is_ended(hasty: RunningService) -> None:
    tokens = [[0.3] * HIDDEN] * 4000
    body = json.dumps({"hidden_states": tokens}, separators=(",", ":")).encode()
    sent = FORWARD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        url = hasty.client.base_url
        client.connect((url.host, url.port))
        with pytest.raises(ConnectionError):  # noqa: PT012 - whichever of the many sends it is
            for _ in range(1000):
                client.sendall(sent)
    assert hasty.client.get("/ready").status_code == 200


def test_idle_connections_stop_nobody(hasty: RunningService) -> None:
    with ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(connected(hasty))
        assert hasty.output(hidden_states=hidden_states(1)).shape == (1, HIDDEN)


def test_connections_are_counted(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MOST_CONNECTIONS", 20)
    with running(open_engine, None) as service, ExitStack() as open_:
        clients = [open_.enter_context(connected(service)) for _ in range(20)]
        for client in clients:  # an answer on each, so that all are known to be counted
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        with connected(service) as one_more:
            [(status, headers, body)] = answers(until_closed(one_more))
        assert (status, headers["connection"]) == (503, "close")
        assert "20 connections" in json.loads(body)["error"]["message"]
        clients[0].close()
        for _ in range(100):
            with connected(service) as again:
                again.sendall(LAST)
                if answers(until_closed(again))[0][0] == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("no connection was taken again")


def test_a_process_that_may_open_few_files_takes_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, allowed in ((1024, 896), (10**6, 8192), (64, 1), (connection_limits.resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_allowed() == allowed
