"""A service that is none: decodes the binary protocol by the letter of its text and answers what a test tells it to."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import ml_dtypes
import numpy as np

from v2_wire import NUMPY

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Received:
    """One infer request, taken apart."""

    path: str
    headers: httpx.Headers
    parameters: dict[str, Any]
    outputs: list[dict[str, Any]]
    tensors: dict[str, Array | list[str]]
    datatypes: dict[str, str]


def received(request: httpx.Request) -> Received:
    """``request`` decoded; fails where it breaks the protocol."""
    body = request.read()
    assert int(request.headers["Content-Length"]) == len(body)
    split = int(request.headers["Inference-Header-Content-Length"])
    head = json.loads(body[:split])
    tensors: dict[str, Array | list[str]] = {}
    for described in head["inputs"]:
        size = described["parameters"]["binary_data_size"]
        data, split = body[split : split + size], split + size
        assert len(data) == size
        assert described["name"] not in tensors
        tensors[described["name"]] = decoded(described["datatype"], described["shape"], data)
    assert split == len(body), "there are bytes that no tensor describes"
    datatypes = {described["name"]: described["datatype"] for described in head["inputs"]}
    return Received(request.url.path, request.headers, head["parameters"], head["outputs"], tensors, datatypes)


def decoded(datatype: str, shape: list[int], data: bytes) -> Array | list[str]:
    """The elements of one tensor."""
    if datatype != "BYTES":
        array: Array = np.frombuffer(data, NUMPY[datatype]).reshape(shape)
        return array
    elements, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        elements.append(data[at + 4 : at + 4 + length].decode())
        at += 4 + length
    assert [len(elements)] == shape
    return elements


def infer_answer(output: Array, versions: dict[str, int] | None = None, **changes: Any) -> httpx.Response:
    """The answer that carries ``output``, its description changed by ``changes``."""
    data = output.astype(ml_dtypes.bfloat16).tobytes()
    described = {"name": "hidden_states", "datatype": "BF16", "shape": list(output.shape)}
    described |= {"parameters": {"binary_data_size": len(data)}, **changes}
    answer = {"model_name": "layers.3", "outputs": [described]}
    answer["parameters"] = {"adapter_versions": json.dumps(versions or {})}
    head = json.dumps(answer).encode()
    return httpx.Response(200, content=head + data, headers={"Inference-Header-Content-Length": str(len(head))})


def minus(sent: Received) -> httpx.Response:
    """The negative of the hidden states, rounded to bf16."""
    hidden = sent.tensors["hidden_states"]
    assert isinstance(hidden, np.ndarray)
    return infer_answer(-hidden.astype(np.float32), {"a": 4})


@dataclass
class StubService:
    """Keeps what it received; ``transport`` carries a client's requests to it."""

    answer: Callable[[Received], httpx.Response] = minus
    requests: list[httpx.Request] = field(default_factory=list)
    infers: list[Received] = field(default_factory=list)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        assert request.method == "POST"
        self.infers.append(received(request))
        return self.answer(self.infers[-1])
