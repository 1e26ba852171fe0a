"""Random conversations with two services, one of which answers some past its application: nobody can tell which."""

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fast_requests import BINARY, INFER, Pair, asking, head, infer, paired, unmade
from mutations import changed_bytes, changed_json
from raw_http import LAST, answered, answers, connected, until_closed
from running_service import EXPERTS, TOP_K, OpenEngine, RunningService, hidden_states
from v2_wire import json_request, request

RIGHT = (
    asking(1),
    asking(3, b"X-Request-Id: mine", id="x"),
    asking(2, parameters={"adapter": "a"}),
    infer(*request({"adapter": ["a", "", "b"], "hidden_states": hidden_states(3)}, **BINARY)),
    infer(json_request({"hidden_states": hidden_states(2)}), None),
    asking(1, b"Accept-Encoding: gzip"),
    b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n",
    head(0),
)
TOPK = {"topk_ids": [[0, EXPERTS - 1]] * 2, "topk_weights": [[0.5] * TOP_K] * 2}
JSON = [request({"hidden_states": hidden_states(2), **more}, **BINARY) for more in ({}, TOPK)]
LINES = st.sampled_from(
    [
        b"Content-Length: 3",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Connection: close",
        b"Connection: keep-alive, x",
        b"Connection: upgrade",
        b"Upgrade: h2c",
        b"Content-Encoding: gzip",
        b"Accept-Encoding: deflate",
        b"Inference-Header-Content-Length: 7",
        b"X-Request-Timeout-Ms: 1e3",
        b"X-Request-Id: \x7f",
        b"X-Request-Id:",
        b"Host",
        b" folded",
        b": x",
        b"A: b\0",
        b"A: b\r",
        b"A: b\n",
        b"A\t: b",
        b"A: " + b"b" * 3000,
        b"",
    ]
)
PATHS = st.sampled_from(
    [
        INFER,
        INFER + b"?x",
        INFER + b"#x",
        INFER.replace(b"v2", b"v2/."),
        INFER.replace(b"1", b"%31"),
        b"/" + INFER,
        b"http://x" + INFER,
        b"/v2/models/layers.1/versions/1/infer",
        b"/v2/models/layers.1/versions//infer",
        b"/v2/models/layers.\xb2/infer",
        b"/v2/models/a/infer",
        b"*",
    ]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A request with lines put into its head, or another target, or bytes of it changed; what is behind the head is
    as it was, and may be no body of it any more."""
    sent = draw(st.sampled_from(RIGHT[:5]))
    start, _, body = sent.partition(b"\r\n\r\n")
    lines = start.split(b"\r\n")
    match draw(st.sampled_from(["lines", "path", "bytes"])):
        case "lines":
            for line in draw(st.lists(LINES, min_size=1, max_size=3)):
                lines.insert(draw(st.integers(1, len(lines))), line)
        case "path":
            lines[0] = b"POST %b HTTP/1.1" % draw(PATHS)
        case "bytes":
            return draw(changed_bytes(start)) + b"\r\n\r\n" + body
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A request whose framing is right and whose body may be anything."""
    body, length = draw(st.sampled_from(JSON))
    if draw(st.booleans()):
        changed = json.dumps(draw(changed_json(json.loads(body[:length])))).encode()
        return infer(changed + body[length:], len(changed))
    return infer(draw(changed_bytes(body)), draw(st.sampled_from([length, None])))


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("adapters")
    with paired(open_engine, root, body_timeout_s=0.3, keep_alive_s=1) as pair:
        yield pair


def cut(sent: bytes, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    places = sorted(draw.choices(range(len(sent) + 1), k=draw.choice([0, 1, 2, 5])))
    return [sent[i:j] for i, j in zip([0, *places], [*places, len(sent)], strict=True)]


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.sampled_from(RIGHT) | bodies(), min_size=1, max_size=8), st.integers(0, 99))
def test_requests_that_are_framed_right(pair: Pair, conversation: list[bytes], seed: int) -> None:
    assert len(pair.same(*cut(b"".join(conversation) + LAST, seed))) == len(conversation) + 1


@FUZZ
@given(st.lists(st.sampled_from(RIGHT), max_size=2), heads())
def test_requests_with_any_head(pair: Pair, before: list[bytes], sent: bytes) -> None:
    """Where the application's connection ended without a word, as bytes behind a request were none, the other one may
    have answered that request before."""

    def said(service: RunningService) -> bytes:
        with connected(service) as client:
            came = b"".join(answered(client, part) for part in before)
            client.sendall(sent + LAST)
            return unmade(came + until_closed(client))

    fast, slow = said(pair.fast), said(pair.slow)
    told = answers(slow)
    assert fast == slow or (not (told and told[-1][1].get("connection") == "close") and fast.startswith(slow))
