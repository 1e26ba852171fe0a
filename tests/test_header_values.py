"""Whitespace around a header's value is no part of it, on every way that a request may take."""

import gzip
import json
from collections.abc import Iterator

import pytest

from fast_requests import BINARY, Pair, infer, paired
from moelet.service.keys import Keys
from raw_http import LAST, connected, received
from running_service import OpenEngine, RunningService, hidden_states
from v2_wire import request

KEY = b"Authorization: Bearer user-key"
WHITESPACE = [b" ", b"\t", b" \t \t"]
BODY, JSON_BYTES = request({"hidden_states": hidden_states(2)}, **BINARY)
NATIVE = json.dumps({"hidden_states": hidden_states(2).tolist()}).encode()


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Services with a key, which loads need too; adapters are below the root of both."""
    root = tmp_path_factory.mktemp("adapters")
    with paired(open_engine, None, more_roots=[root], keys=Keys(["user-key"])) as pair:
        for service in (pair.fast, pair.slow):
            service.root = root
            service.write("good", 1)
        yield pair


@pytest.fixture(params=WHITESPACE, ids=["space", "tab", "both"])
def around(request: pytest.FixtureRequest) -> bytes:
    whitespace: bytes = request.param
    return whitespace


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: x", *lines, b"", body])


def last(around: bytes) -> bytes:
    """Like ``LAST``, with a key and an end that both have ``around`` them."""
    return LAST.replace(b": close", b":%bclose%b\r\n%b" % (around, around, padded(KEY, around)))


def padded(line: bytes, around: bytes) -> bytes:
    name, _, value = line.partition(b": ")
    return b"%b:%b%b%b" % (name, around, value, around)


def test_an_inference_straight_from_its_connection(pair: Pair, around: bytes) -> None:
    lines = [b"X-Request-Id: mine", b"X-Request-Timeout-Ms: 20000.5", b"Accept-Encoding: identity", KEY]
    lines.append(b"Inference-Header-Content-Length: %d" % JSON_BYTES)
    sent = infer(BODY, None, *(padded(line, around) for line in lines))
    sent = sent.replace(b"Content-Length: %d\r" % len(BODY), padded(b"Content-Length: %d" % len(BODY), around) + b"\r")
    (status, headers, body), _ = pair.same(sent, last(around))
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert len(body) > JSON_BYTES
    assert pair.begun == [True]


def test_an_inference_through_the_application(pair: Pair, around: bytes) -> None:
    packed = gzip.compress(BODY)
    lines = [b"X-Request-Id: mine", b"X-Request-Timeout-Ms: 20000", b"Content-Encoding: gzip", KEY]
    lines += [b"Accept-Encoding: deflate", b"Content-Length: %d" % len(packed)]
    lines.append(b"Inference-Header-Content-Length: %d" % JSON_BYTES)
    sent = post(b"/v2/models/layers.1/infer", packed, *(padded(line, around) for line in lines))
    (status, headers, _), _ = pair.same(sent, last(around))
    assert (status, headers["x-request-id"], headers["content-encoding"]) == (200, "mine", "deflate")
    assert pair.begun == []


def test_a_native_forward(pair: Pair, around: bytes) -> None:
    for coding, body in ((b"gzip", gzip.compress(NATIVE)), (b"identity", NATIVE)):
        lines = [b"X-Request-Id: a b", b"X-Request-Timeout-Ms: 20000", b"Content-Encoding: " + coding, KEY]
        lines.append(b"Content-Length: %d" % len(body))
        sent = post(b"/v1/layers/1/forward", body, *(padded(line, around) for line in lines))
        (status, headers, _), _ = pair.same(sent, last(around))
        assert (status, headers["x-request-id"]) == (200, "a b")


def test_a_load_straight_from_its_connection(pair: Pair, around: bytes) -> None:
    body = json.dumps({"path": str(pair.fast.root / "good")}).encode()
    lines = [b"X-Request-Id: mine", KEY, b"Content-Length: %d" % len(body)]
    sent = post(b"/v1/adapters/a", body, *(padded(line, around) for line in lines)).replace(b"POST", b"PUT")
    (status, headers, _), _ = pair.same(sent, last(around))
    assert status in (200, 201)
    assert headers["x-request-id"] == "mine"


def test_whitespace_that_is_all_of_a_value_or_inside_of_it(pair: Pair, around: bytes) -> None:
    inside = post(b"/ready", b"", b"X-Request-Id: a%bb" % around).replace(b"POST", b"GET")
    none = post(b"/ready", b"", b"X-Request-Id:" + around).replace(b"POST", b"GET")
    (_, first, _), (_, second, _), _ = pair.same(inside, none, last(around))
    assert first["x-request-id"] == ("a b" if around == b" " else "0" * 32)
    assert second["x-request-id"] == "0" * 32


@pytest.mark.parametrize("way", ["fast", "slow"])
def test_a_client_that_waits_to_be_told_to_go_on(pair: Pair, around: bytes, way: str) -> None:
    service: RunningService = getattr(pair, way)
    lines = [b"Expect: 100-continue", KEY, b"Content-Length: %d" % len(NATIVE)]
    head = post(b"/v1/layers/1/forward", b"", *(padded(line, around) for line in lines))
    with connected(service) as client:
        client.sendall(head)
        assert received(client).startswith(b"HTTP/1.1 100 Continue\r\n")
        client.sendall(NATIVE)
        assert received(client).startswith(b"HTTP/1.1 200 OK\r\n")
