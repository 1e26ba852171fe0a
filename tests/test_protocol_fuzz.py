"""Streams of HTTP with bytes changed, lost and put in, sent in pieces by clients that leave at any moment."""

import json
import random
import socket
import time
from collections.abc import Iterator

import pytest

from fast_requests import asking
from raw_http import connected
from running_service import OpenEngine, RunningService, hidden_states, running

BODY = json.dumps({"hidden_states": hidden_states(2).tolist()}).encode()
FORWARD = b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\n"
REQUESTS = (
    b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n",
    FORWARD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    FORWARD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nA: b\r\n\r\n" % (len(BODY), BODY),
    FORWARD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n{}   ",
    b"GET /health HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n\r\n",
    b"HEAD /health HTTP/1.0\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: y\r\n\r\n",
    b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n\r\n",
    asking(1),
    asking(2, b"X-Request-Id: mine") + asking(3),
)
PUT_IN = (b"\r\n", b"\0", b":", b" ", b"\r\nContent-Length: 3\r\n", b"\r\nTransfer-Encoding: chunked\r\n", b"a" * 5000)


def changed(draw: random.Random) -> bytes:
    """Some requests behind each other, with some changes."""
    stream = bytearray(b"".join(draw.choices(REQUESTS, k=draw.randint(1, 4))))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 5))):
        place = draw.randrange(len(stream))
        match draw.randrange(3):
            case 0:
                stream[place] = draw.randrange(256)
            case 1:
                del stream[place : place + draw.randint(1, 20)]
            case _:
                stream[place:place] = draw.choice(PUT_IN)
        if not stream:
            break
    return bytes(stream)


def pieces(draw: random.Random, stream: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(stream):
        stop = start + draw.choice((1, 7, 50, 10_000))
        yield stream[start:stop]
        start = stop


def send(draw: random.Random, service: RunningService) -> bytes:
    """One client's life; what it read of the answers."""
    with connected(service, 2) as client:
        try:
            for piece in pieces(draw, changed(draw)):
                client.sendall(piece)
            if draw.random() < 0.5:
                client.shutdown(socket.SHUT_WR)
            return client.recv(100) if draw.random() < 0.6 else b""
        except OSError:
            return b""


def test_no_stream_of_bytes_is_a_fault_of_the_service(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with running(open_engine, None, body_timeout_s=0.5, keep_alive_s=1) as service:
        draw = random.Random(20261129)
        said = [send(draw, service) for _ in range(400)]
        assert all(text.startswith(b"HTTP/1.1 ") for text in said if text)
        statuses = {text[9:12] for text in said if text}
        assert {b"200", b"400"} <= statuses <= {b"100", b"200", b"400", b"404", b"405", b"413", b"431"}
        expected = service.output(hidden_states=hidden_states(2))
        assert expected.isfinite().all()
        deadline = time.monotonic() + 20
        while service.metric("moelet_requests_in_flight"):
            assert time.monotonic() < deadline
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
