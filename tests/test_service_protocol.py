"""HTTP below the application, spoken to over bare sockets: what is no HTTP, heads without end, and upgrades."""

import json
from collections.abc import Iterator

import pytest
import torch

from moelet.service.protocol import MAX_HEAD_BYTES
from raw_http import LAST, answers, spoken
from running_service import HIDDEN, RunningService, hidden_states

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_the_one_error_shape(running_service: RunningService, sent: bytes) -> None:
    [(status, headers, body)] = answers(spoken(running_service, iter([sent])))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert set(error) == {"message", "type", "param", "code"}
    assert (headers["connection"], len(headers["x-request-id"])) == ("close", 32)


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\nA: b\r\nC: ", b"GET /"])
def test_a_head_without_end_is_ended(running_service: RunningService, start: bytes) -> None:
    def endless() -> Iterator[bytes]:
        yield start
        for _ in range(64):
            yield b"a" * MAX_HEAD_BYTES

    [(status, headers, body)] = answers(spoken(running_service, endless()))
    assert (status, headers["connection"]) == (431, "close")
    assert str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nHost: x\r\nA: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nHost: x\r\n" + (b"A: " + b"a" * 1000 + b"\r\n") * 80 + b"\r\n",
    ],
    ids=["target", "header", "headers"],
)
def test_a_head_that_is_too_long_is_told_so_also_in_one_piece(running_service: RunningService, sent: bytes) -> None:
    [(status, headers, body)] = answers(spoken(running_service, iter([sent])))
    assert (status, headers["connection"]) == (431, "close")
    assert str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]


def test_a_long_head_in_pieces_is_read(running_service: RunningService) -> None:
    def long() -> Iterator[bytes]:
        yield b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\nA: "
        yield b"a" * (MAX_HEAD_BYTES // 4)
        yield b"\r\n\r\n"

    assert [status for status, *_ in answers(spoken(running_service, long()))] == [200]


def forward_that_asks_to_upgrade(framing: str) -> bytes:
    body = json.dumps({"hidden_states": hidden_states(2).tolist()}).encode()
    if framing == "chunked":
        head, body = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        head = b"Content-Length: %d" % len(body)
    return b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + UPGRADE + b"\r\n" + body


@pytest.mark.parametrize("framing", ["whole", "chunked"])
@pytest.mark.parametrize("pieces", [1, 7])
def test_an_upgrade_is_ignored_and_the_body_is_not(running_service: RunningService, framing: str, pieces: int) -> None:
    """HTTP clients that would rather speak HTTP/2 ask so beside a body; the parser takes that for HTTP/2."""
    sent = forward_that_asks_to_upgrade(framing) + LAST
    size = -(-len(sent) // pieces)
    said = answers(spoken(running_service, (sent[i : i + size] for i in range(0, len(sent), size))))
    assert [status for status, *_ in said] == [200, 200]
    got = torch.tensor(json.loads(said[0][2])["hidden_states"])
    assert torch.equal(got, running_service.output(hidden_states=hidden_states(2)))
    assert json.loads(said[1][2]) == {"status": "ready"}


def test_a_body_is_never_read_as_the_next_request(running_service: RunningService) -> None:
    inner = b"DELETE /v1/adapters/a HTTP/1.1\r\nHost: x\r\n\r\n"
    running_service.load("a", "good")
    sent = b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(inner) + UPGRADE + b"\r\n"
    said = answers(spoken(running_service, iter([sent + inner + LAST])))
    assert [status for status, *_ in said] == [400, 200]
    assert [record["name"] for record in running_service.records()] == ["a"]
    running_service.unload_all()


def test_many_upgrades_in_one_piece(running_service: RunningService) -> None:
    asking = b"GET /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    said = answers(spoken(running_service, iter([asking * 1200 + LAST])))
    assert [status for status, *_ in said] == [200] * 1201


def test_a_websocket_is_not_offered_and_the_request_is_answered_as_http(running_service: RunningService) -> None:
    sent = (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    )
    sent += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    (status, headers, _), _ = answers(spoken(running_service, iter([sent + LAST])))
    assert status == 200
    assert headers["x-request-id"]


def test_head_and_bodies_that_nobody_asked_for(running_service: RunningService) -> None:
    sent = b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert spoken(running_service, iter([sent])).endswith(b"\r\n\r\n")
    body = b"x" * HIDDEN
    sent = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body + LAST
    assert [status for status, *_ in answers(spoken(running_service, iter([sent])))] == [200, 200]
