"""Inferences answered straight from their connection: in every way as the application answers them."""

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from fast_requests import BINARY, INFER, Pair, asking, head, infer, paired
from moelet.service.protocol import MAX_HEADERS
from raw_http import LAST, answered, answers, connected, spoken, until_closed
from running_service import EXPERTS, MAX_BODY_BYTES, TOP_K, OpenEngine, hidden_states, running
from v2_wire import json_request, request

READY = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
HIDDEN_STATES = {"hidden_states": hidden_states(3)}
ROUTINGS: list[dict[str, Any]] = [
    {},
    {"router_logits": torch.ones(3, EXPERTS)},
    {"topk_ids": torch.zeros(3, TOP_K), "topk_weights": torch.ones(3, TOP_K)},
    {"adapter": ["a"]},
    {"adapter": ["b", "", "a"]},
]
TAKEN = {
    "usual": asking(1),
    "larger than one packet": asking(5000),
    "as JSON": asking(3, **{"parameters": {}}),
    "an id, FP32": asking(2, id="mine é", parameters={"binary_data_output": True, "output_datatype": "FP32"}),
    "all of it JSON": infer(json_request(HIDDEN_STATES), None),
    "version": infer(*request(HIDDEN_STATES, **BINARY), path=b"/v2/models/layers.3/versions/1/infer"),
    "request id": asking(1, b"X-Request-Id: mine", b"x-request-id: other"),
    "no request id that is repeated": asking(1, b"X-Request-Id: m\xe9"),
    "timeout": asking(1, b"X-Request-Timeout-Ms: 20000.5"),
    "asked to stay": asking(1, b"Connection: keep-alive", b"Accept-Encoding: gzip, deflate", b"Authorization: x"),
    "length with zeros": head(f"00{len(request(HIDDEN_STATES)[0])}") + request(HIDDEN_STATES)[0],
    "no header length": head(0, b"Accept: */*").replace(b": 0", b": 2") + b"{}",
    "as many headers as may be": asking(1, *[b"A: b"] * (MAX_HEADERS - 3)),
    **{f"routing {i}": infer(*request(HIDDEN_STATES | more, **BINARY)) for i, more in enumerate(ROUTINGS)},
}
"""Requests that are looked at on the way past the application, all of whose heads are plain."""

REFUSED_THERE = {"length with zeros", "no header length"}
"""Those of them whose bodies are not right."""

CHUNKED = b"5\r\n{}   \r\n0\r\n\r\n"
LEFT = {
    "query": infer(*request(HIDDEN_STATES), path=INFER + b"?a=b"),
    "escape": infer(*request(HIDDEN_STATES), path=b"/v2/models/layers%2e1/infer"),
    "other layer": infer(*request(HIDDEN_STATES), path=b"/v2/models/layers.2/infer"),
    "layer that is no number": infer(*request(HIDDEN_STATES), path="/v2/models/layers.²/infer".encode("latin-1")),
    "other version": infer(*request(HIDDEN_STATES), path=b"/v2/models/layers.1/versions/2/infer"),
    "absolute": infer(*request(HIDDEN_STATES), path=b"http://x" + INFER),
    "close": asking(1, b"Connection: close"),
    "close among others": asking(1, b"Connection: a, close"),
    "HTTP/1.0": asking(1).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "upgrade": asking(1, b"Connection: Upgrade", b"Upgrade: h2c"),
    "gzip accepted": asking(1, b"Accept-Encoding: gzip"),
    "gzip sent": asking(1, b"Content-Encoding: gzip"),
    "identity sent": asking(1, b"Content-Encoding: identity"),
    "chunked": head("").replace(b"Content-Length: ", b"Transfer-Encoding: chunked") + CHUNKED,
    "chunked with a length": head(5, b"Transfer-Encoding: chunked") + CHUNKED,
    "length 0": head(0),
    "no length": head(0).replace(b"Content-Length: 0\r\n", b""),
    "lengths": head(5, b"Content-Length: 5") + b"{}   ",
    "lengths that differ": head(5, b"Content-Length: 3") + b"{}   ",
    "length +5": head("+5") + b"{}   ",
    "length 5_0": head("5_0") + b"{}   ",
    "length of two": head("5, 5") + b"{}   ",
    "length in other digits": head("٥") + b"{}   ",
    "huge length": head(10**12),
    "length beyond any": head(10**200),
    "body over the limit": head(MAX_BODY_BYTES + 1),
    "folded": head(5, b"A: b\r\n c") + b"{}   ",
    "folded length": head("\r\n 5") + b"{}   ",
    "space before the colon": head(5, b"A : b") + b"{}   ",
    "bare LF": head(5, end=b"\n") + b"{}   ",
    "bare CR": head(5, end=b"\r") + b"{}   ",
    "head that ends early": head(30).replace(b"30\r\n\r\n", b"30\n\n") + b"GET /live HTTP/1.1\r\n\r\n" + READY,
    "bare CR in a value": head(5, b"A: b\rc") + b"{}   ",
    "NUL": head(5, b"A: b\0c") + b"{}   ",
    "header without a name": head(5, b": b") + b"{}   ",
    "too many headers": asking(1, *[b"A: b"] * (MAX_HEADERS - 2)),
    "long head": asking(1, b"A: " + b"b" * 5000),
    "wrong header length": asking(1, b"Inference-Header-Content-Length: x"),
    "wrong timeout": asking(1, b"X-Request-Timeout-Ms: -1"),
    "no such path": infer(*request(HIDDEN_STATES), path=INFER + b"/"),
    "other method": asking(1).replace(b"POST", b"PUT"),
    "lines before it": b"\r\n\r\n" + asking(1),
}
"""Requests that are not looked at there."""

FAULTY = {
    "no JSON": infer(b"{" * 50, None),
    "header length beyond the body": infer(b"{}", 3),
    "no tokens": asking(0),
    "unknown adapter": asking(1, parameters={"adapter": "none"}),
    "body too short": infer(
        asking(2).partition(b"\r\n\r\n")[2][:-3], request({"hidden_states": hidden_states(2)}, **BINARY)[1]
    ),
    "timeout that has passed": asking(1, b"X-Request-Timeout-Ms: 0.000001"),
    "wrong experts": infer(*request(HIDDEN_STATES | {"topk_ids": [[9, 9]] * 3, "topk_weights": [[1, 1]] * 3})),
}
"""Requests whose heads are right and that are answered with an error, or without being computed."""


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with paired(open_engine, tmp_path_factory.mktemp("adapters")) as pair:
        yield pair


@pytest.mark.parametrize("name", TAKEN)
def test_every_byte_of_an_answer_is_the_application_s(pair: Pair, name: str) -> None:
    first, second, (last, *_) = pair.same(TAKEN[name], TAKEN[name], LAST)
    assert set(pair.begun) == {name not in REFUSED_THERE}
    assert (first[0], last) == (400 if name in REFUSED_THERE else 200, 200)
    without_id = [{**said[1], "x-request-id": ""} for said in (first, second)]
    assert without_id[0] == without_id[1]
    assert first[2] == second[2]


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_plain_is_left_to_the_application(pair: Pair, name: str) -> None:
    """Also behind a request that was not, and with bytes behind it that are none of its own."""
    pair.same(LEFT[name], LAST)
    assert pair.begun == []
    pair.same_behind(asking(2), LEFT[name] + LAST)
    assert pair.begun == [True]


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_told_in_the_application_s_words_and_counted_once(pair: Pair, name: str) -> None:
    (status, headers, body), *_ = pair.same_behind(FAULTY[name], asking(1) + LAST)
    assert pair.begun == [name.startswith("timeout"), True]
    if status != 200:
        assert set(json.loads(body)) == {"error"}
    assert len(headers["x-request-id"]) == 32


def test_a_request_cut_anywhere_is_the_same_request(pair: Pair) -> None:
    """In two pieces at every place, on one connection; the first piece holds the whole head or does not."""
    sent = asking(1, b"X-Request-Id: cut")
    [(_, _, expected), _] = pair.same(sent, LAST)
    pair.begun.clear()
    parts = [part for place in range(1, len(sent)) for part in (sent[:place], sent[place:])]
    for service in (pair.fast, pair.slow):
        with connected(service) as client:
            for first, second in zip(parts[::2], parts[1::2], strict=True):
                client.sendall(first)
                [(_, _, told)] = answers(answered(client, second))
                assert told == expected
    assert len(sent) // 4 < len(pair.begun)
    assert all(pair.begun)


def test_a_request_cut_anywhere_twice_is_the_same_request(pair: Pair) -> None:
    sent, draw = asking(1), random.Random(5)
    ends = sent.index(b"\r\n\r\n")
    places = [sorted(draw.sample(range(1, len(sent)), 2)) for _ in range(150)]
    places += [[ends + i, ends + j] for i in range(6) for j in range(i + 1, 7)]
    parts = [part for i, j in places for part in (sent[:i], sent[i:j], sent[j:])]
    assert {status for status, *_ in pair.same(*parts, LAST, pause_s=0.001)} == {200}


def test_many_requests_in_one_packet_are_answered_in_order(pair: Pair) -> None:
    """More than a stack is deep, right ones and wrong ones and ones of the application's in turn."""
    draw = random.Random(1)
    kinds = [asking(1, b"X-Request-Id: %d"), FAULTY["no JSON"], READY, LEFT["gzip accepted"], FAULTY["no tokens"]]
    for weights in ((9, 1, 0, 0, 0), (3, 1, 1, 1, 1)):
        chosen = draw.choices(kinds, weights, k=1100)
        sent = b"".join(kind.replace(b"%d", b"%d" % i) for i, kind in enumerate(chosen)) + LAST
        said = pair.same(sent)
        ids = [
            (i, headers["x-request-id"]) for i, (_, headers, _) in enumerate(said) if len(headers["x-request-id"]) < 32
        ]
        assert len(said) == 1101
        assert ids == [(i, str(i)) for i, kind in enumerate(chosen) if kind is kinds[0]]


@pytest.mark.parametrize(
    "behind", [READY, asking(2), asking(3)[:100], LEFT["gzip accepted"], FAULTY["no JSON"], b"\r\n"]
)
def test_what_comes_behind_a_request_waits_for_its_answer(pair: Pair, behind: bytes) -> None:
    """In the same packet, in one of its own, and byte by byte."""
    whole = behind if len(behind) != 100 else asking(3)
    in_pieces = [behind[i : i + 1] for i in range(len(behind))]
    for service, pieces in product((pair.fast, pair.slow), ([behind], in_pieces)):
        with connected(service) as client:
            with service.engine.closed():
                client.sendall(asking(1, b"X-Request-Id: first"))
                assert service.engine.waiting.wait(10)
                for piece in pieces:
                    client.sendall(piece)
                client.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(10)
            client.sendall(whole[len(behind) :] + LAST)
            said = answers(until_closed(client))
        assert said[0][1]["x-request-id"] == "first"
        assert said[1:-1] == [] if behind == b"\r\n" else len(said) == 3
    pair.same(asking(1) + behind, whole[len(behind) :] + LAST, pause_s=0.05)


def test_bytes_that_are_no_request_behind_one(open_engine: OpenEngine) -> None:
    """The one is answered, then they are refused: through the application, they may cost its answer."""
    with running(open_engine, None) as service:
        said = spoken(service, iter([asking(1) + b"garbage\r\n\r\n"]))
        assert [status for status, *_ in answers(said)] == [200, 400]


def test_a_body_is_never_read_as_a_request(pair: Pair) -> None:
    inner = b"DELETE /v1/adapters/a HTTP/1.1\r\nHost: x\r\n\r\n"
    body, json_bytes = request(HIDDEN_STATES)
    for sent in (infer(inner, None), infer(inner, len(inner)), infer(body[:json_bytes] + inner, json_bytes)):
        assert [status for status, *_ in pair.same(sent, sent[:60], sent[60:], LAST, pause_s=0.005)] == [400, 400, 200]
    assert set(pair.fast.service.adapters.in_flight_by_name()) == {"a", "b"}


def test_an_adapter_s_version_is_the_one_at_the_admission(pair: Pair) -> None:
    sent = asking(2, parameters={"adapter": "a", "binary_data_output": True})
    told = []
    for _ in range(2):
        said = pair.same(sent, LAST)[0]
        told.append(json.loads(said[2][: int(said[1]["inference-header-content-length"])])["parameters"])
        for service in (pair.fast, pair.slow):
            assert service.load("a", str(service.root / "b"), load_inplace=True).status_code == 200
    assert pair.begun == [True]
    assert [json.loads(parameters["adapter_versions"]) for parameters in told] == [{"a": 1}, {"a": 2}]


def test_on_asyncio_s_own_loop(open_engine: OpenEngine) -> None:
    with paired(open_engine, None, loop="asyncio") as pair:
        names = ["usual", "larger than one packet", "as JSON", "request id"]
        sent = [TAKEN[name] for name in names] + [FAULTY["no JSON"], READY, *LEFT.values()][:8]
        pair.same(b"".join(TAKEN[name] for name in names) * 20 + LAST)
        for request_ in sent:
            pair.same_behind(asking(1), request_ + LAST)
        assert any(pair.begun)
