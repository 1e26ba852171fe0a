"""What the client puts on the wire and takes from it, against a reader of the protocol that shares no code with it."""

import subprocess
import sys
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch

from moelet.layer.errors import ConfigurationError, RequestError
from moelet.service.client import Client, ServiceError, ServiceTimeoutError, ServiceUnreachableError
from source_tree import ROOT
from stub_v2 import Received, StubService, infer_answer, minus

TOKENS, HIDDEN = 5, 24


def client_of(stub: StubService, **options: Any) -> Client:
    return Client("http://nowhere", transport=stub.transport, **options)


def hidden(kind: str) -> Any:
    """Random ``[T, H]`` with values that bf16 rounds, NaN, infinity and -0 among them."""
    values = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    values[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-30])
    library, _, dtype = kind.partition(" ")
    if library == "torch":
        return values.to(getattr(torch, dtype))
    return values.numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


KINDS = [f"{library} {dtype}" for library in ("torch", "numpy") for dtype in ("bfloat16", "float16", "float32")]


def as_bf16(values: Any) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values).astype(np.float32))
    return tensor.bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_go_and_come_back_as_they_are(kind: str) -> None:
    stub = StubService()
    sent = hidden(kind)
    got = client_of(stub).forward(3, sent)
    wanted = as_bf16(sent)
    torch.testing.assert_close(as_bf16(stub.infers[0].tensors["hidden_states"]), wanted, rtol=0, atol=0, equal_nan=True)
    assert (type(got), got.dtype, got.shape) == (type(sent), sent.dtype, sent.shape)
    torch.testing.assert_close(as_bf16(got), -wanted, rtol=0, atol=0, equal_nan=True)
    got[0, 0] = 1
    assert stub.infers[0].path == "/v2/models/layers.3/infer"
    assert stub.infers[0].outputs == [{"name": "hidden_states", "parameters": {"binary_data": True}}]
    if kind.startswith("torch"):
        assert stub.infers[0].datatypes["hidden_states"] == "BF16"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"adapter": ""}, "adapter"),
        ({"adapter": "a\ud800"}, "adapter"),
        ({"adapter": 5}, "adapter"),
        ({"adapters": ["a"] * 4 + ["a\ud800"]}, "adapters"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_what_cannot_be_sent_is_a_request_error(given: dict[str, Any], param: str) -> None:
    stub = StubService()
    with pytest.raises(RequestError) as refused:
        client_of(stub).forward(0, hidden("numpy float32"), **given)
    assert refused.value.param == param
    assert not stub.infers


def test_names_and_paths_that_are_no_unicode_are_request_errors() -> None:
    client = client_of(StubService())
    for call in (client.adapter, client.unload_adapter, lambda name: client.load_adapter(name, "x", replace=True)):
        with pytest.raises(RequestError, match="adapter"):
            call("\udcff")
    for replace in (False, True):
        with pytest.raises(RequestError, match="JSON"):
            client.load_adapter("a", "/x\udcff", replace=replace)


@pytest.mark.parametrize("seconds", [1e5, 1e30, float("inf")])
def test_a_timeout_longer_than_any_is_the_longest(seconds: float) -> None:
    stub = StubService()
    client_of(stub, timeout_s=seconds).forward(0, hidden("numpy float32"), timeout_s=seconds)
    assert stub.infers[0].headers["X-Request-Timeout-Ms"] == "86400000"


@pytest.mark.parametrize("key", ["", "two words", "se\ncret", "s\u00e9cret", "s" * 513])
def test_a_key_that_no_service_has_is_told_at_once_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigurationError, match="api_key should be") as refused:
        Client("http://nowhere", key)
    assert key == "" or key not in str(refused.value)


def test_strided_and_differentiable_tensors_are_sent_by_value() -> None:
    stub = StubService()
    wide = torch.randn(HIDDEN, 2 * TOKENS, requires_grad=True)
    array = np.arange(2 * TOKENS * HIDDEN, dtype=">f4").reshape(HIDDEN, -1)
    for sent in (wide.t()[::2], array.T[1::2]):
        client_of(stub).forward(0, sent)
        assert torch.equal(as_bf16(stub.infers[-1].tensors["hidden_states"]), as_bf16(np.array(sent.tolist())))


def test_no_tokens_are_a_call_as_well() -> None:
    for sent in (torch.empty(0, HIDDEN), np.empty((0, HIDDEN), np.float32)):
        stub = StubService()
        assert client_of(stub).forward(0, sent).shape == (0, HIDDEN)
        assert len(stub.infers) == 1


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_top_k_and_logits_are_sent_as_they_are(library: str) -> None:
    stub = StubService()
    ids = torch.tensor([[3, -1], [0, 7], [2, 1], [-1, -1], [5, 4]])
    weights = torch.randn(TOKENS, 2)
    logits = torch.randn(TOKENS, 8).bfloat16()
    sent: dict[str, Any] = {"topk_ids": ids, "topk_weights": weights, "router_logits": logits}
    if library == "numpy":
        bits = logits.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        sent = {"topk_ids": ids.numpy(), "topk_weights": weights.numpy(), "router_logits": bits}
    client_of(stub).forward(0, hidden(f"{library} float32"), **sent)
    got = stub.infers[0]
    assert (got.datatypes["topk_weights"], got.datatypes["router_logits"]) == ("FP32", "FP32")
    assert np.array_equal(got.tensors["topk_ids"], ids.numpy())
    assert np.array_equal(got.tensors["topk_weights"], weights.numpy())
    assert np.array_equal(got.tensors["router_logits"], logits.float().numpy())
    client_of(stub).forward(0, hidden(f"{library} float32"), topk_ids=ids.int(), topk_weights=weights.half())
    assert stub.infers[1].datatypes["topk_ids"] == "INT32"
    assert np.array_equal(stub.infers[1].tensors["topk_weights"], weights.half().float().numpy())


def test_adapters() -> None:
    stub = StubService()
    client = client_of(stub)
    names = ["a", None, "second.one", "a", None]
    client.forward(0, hidden("torch bfloat16"), adapters=names)
    assert stub.infers[0].datatypes["adapter"] == "BYTES"
    assert stub.infers[0].tensors["adapter"] == ["a", "", "second.one", "a", ""]
    answer = client.answer(0, hidden("torch bfloat16"), adapter="a")
    assert stub.infers[1].parameters == {"adapter": "a"}
    assert "adapter" not in stub.infers[1].tensors
    assert answer.adapter_versions == {"a": 4}
    client.forward(0, hidden("torch bfloat16"))
    assert stub.infers[2].parameters == {}


def test_headers() -> None:
    stub = StubService()
    client = client_of(stub, api_key="secret")
    client.forward(0, hidden("torch bfloat16"), timeout_s=1.5)
    client.forward(0, hidden("torch bfloat16"))
    first, second = (sent.headers for sent in stub.infers)
    assert first["Authorization"] == "Bearer secret"
    assert (first["X-Request-Timeout-Ms"], "X-Request-Timeout-Ms" in second) == ("1500", False)
    assert first["Accept-Encoding"] == "identity"
    assert "Transfer-Encoding" not in first
    assert len(first["X-Request-Id"]) == 32
    assert first["X-Request-Id"] != second["X-Request-Id"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_states": [[1.0]]}, "hidden_states should be a torch tensor or a numpy array, got a list"),
        ({"hidden_states": torch.zeros(2, 3, 4)}, r"got float32 of shape \[2, 3, 4\]"),
        ({"hidden_states": np.zeros((2, 4))}, r"float32 or float16 or bfloat16, got float64"),
        ({"hidden_states": torch.zeros(2, 4, dtype=torch.int8)}, "got int8"),
        ({"topk_ids": torch.zeros(TOKENS, 2)}, r"topk_ids should be two-dimensional, of int32 or int64, got float32"),
        ({"topk_weights": np.zeros(TOKENS, np.float32)}, r"topk_weights .* of shape \[5\]"),
        ({"adapter": "a", "adapters": ["a"] * TOKENS}, "adapter for all tokens or adapters for each, not both"),
        ({"adapter": ""}, "adapter should be a name"),
        ({"adapters": ["a"]}, "adapters should be one for each of 5 tokens, got 1"),
        ({"adapters": ["a", "", None, "a", "a"]}, "names and None, got ''"),
    ],
)
def test_what_cannot_be_sent_is_not_sent(changes: dict[str, Any], told: str) -> None:
    stub = StubService()
    with pytest.raises(RequestError, match=told):
        client_of(stub).forward(0, **({"hidden_states": hidden("torch float32")} | changes))
    assert stub.requests == []


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda _: httpx.Response(200, content=b"{}"), "Inference-Header-Content-Length should be"),
        (
            lambda _: httpx.Response(200, json=[], headers={"Inference-Header-Content-Length": "2"}),
            "describe one output",
        ),
        (lambda _: httpx.Response(200, content=b"<p>", headers={"Inference-Header-Content-Length": "3"}), "breaks"),
        (lambda _: httpx.Response(200, content=b"{}", headers={"Inference-Header-Content-Length": "9"}), "got '9'"),
        (lambda _: infer_answer(np.zeros((5, 24)), datatype="FP32"), r"'FP32', \[5, 24\]"),
        (lambda _: infer_answer(np.zeros((5, 24)), shape=[5, 23]), r"BF16 of \[5, 24\], got .*23"),
        (lambda _: infer_answer(np.zeros((4, 24)), shape=[5, 24]), "should take 240 bytes, got 192"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_error(broken: Any, told: str) -> None:
    with pytest.raises(ServiceError, match=told):
        client_of(StubService(broken)).forward(0, hidden("torch float32"))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (httpx.Response(404, json={"error": "no adapter b"}), ServiceError, "no adapter b"),
        (httpx.Response(400, json={"error": {"message": "bad rank"}}), ServiceError, "bad rank"),
        (httpx.Response(504, json={"error": "too late"}), ServiceTimeoutError, "too late"),
        (httpx.Response(502, text="<p>proxy</p>"), ServiceError, "the service answered 502 Bad Gateway: <p>proxy</p>"),
        (httpx.Response(500), ServiceError, "the service answered 500 Internal Server Error"),
    ],
)
def test_errors_carry_what_the_service_said(answer: httpx.Response, kind: type[ServiceError], message: str) -> None:
    answer.headers.update({"X-Request-Id": "r1", "Retry-After": "7"})
    with pytest.raises(ServiceError) as caught:
        client_of(StubService(lambda _: answer)).forward(0, hidden("torch float32"))
    error = caught.value
    assert type(error) is kind
    assert (error.message, error.status, error.request_id) == (message, answer.status_code, "r1")
    assert error.retry_after_s == 7
    assert str(error) == f"{message} (status {answer.status_code}, request r1)"


def test_a_connection_that_was_closed_meanwhile_is_made_anew_once() -> None:
    failures = [httpx.RemoteProtocolError("Server disconnected without sending a response.")]

    def answer(sent: Received) -> httpx.Response:
        if failures:
            raise failures.pop()
        return minus(sent)

    stub = StubService(answer)
    client_of(stub).forward(0, hidden("torch float32"))
    assert len(stub.requests) == 2
    failures += [httpx.ReadError("reset")] * 2
    with pytest.raises(ServiceUnreachableError, match="http://nowhere cannot be reached: reset") as caught:
        client_of(stub).forward(0, hidden("torch float32"))
    assert caught.value.status is None
    assert caught.value.request_id == stub.requests[-1].headers["X-Request-Id"]


def test_a_change_is_never_asked_for_twice() -> None:
    asked = []

    def broken(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ReadError("reset")

    with Client("http://nowhere", transport=httpx.MockTransport(broken)) as client:
        for change in (
            lambda: client.load_adapter("a", "there"),
            lambda: client.load_adapter("a", "there", replace=True),
            lambda: client.unload_adapter("a"),
        ):
            asked.clear()
            with pytest.raises(ServiceUnreachableError):
                change()
            assert len(asked) == 1


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "unix:"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="should be http"):
        Client(url)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
from moelet.service.client import Client, RemoteExperts
from stub_v2 import StubService
stub = StubService()
sent = np.arange(12, dtype=np.float32).reshape(3, 4)
got = Client("http://nowhere", transport=stub.transport).forward(0, sent, topk_ids=np.zeros((3, 1), np.int32))
assert (got == -sent).all() and got.dtype == np.float32
"""


def test_numpy_alone_is_enough() -> None:
    paths = f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}, {str(ROOT / 'tests')!r}]\n"
    subprocess.run([sys.executable, "-c", paths + WITHOUT_TORCH], check=True)
