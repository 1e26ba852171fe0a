"""Requests and answers of the Open Inference Protocol put together and taken apart by hand, by its text alone."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
NUMPY = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
}
USUAL = {"hidden_states": "BF16", "topk_ids": "INT32", "topk_weights": "FP32", "router_logits": "FP32"}


def bytes_tensor(names: Iterable[str | bytes]) -> bytes:
    """Elements of BYTES: each behind its length."""
    raw = [name.encode() if isinstance(name, str) else name for name in names]
    return b"".join(len(name).to_bytes(4, "little") + name for name in raw)


def described(name: str, value: Any, datatype: str | None = None) -> tuple[dict[str, Any], bytes]:
    """An input and its bytes: ``value`` is a list of strings for ``adapter``, else anything numpy takes."""
    if name == "adapter":
        raw, shape, datatype = bytes_tensor(value), [len(value)], "BYTES"
    else:
        datatype = datatype or USUAL[name]
        array = np.asarray(value).astype(NUMPY[datatype])
        raw, shape = array.tobytes(), list(array.shape)
    parameters = {"binary_data_size": len(raw)}
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": parameters}, raw


def request(inputs: Mapping[str, Any], datatypes: Mapping[str, str] | None = None, **fields: Any) -> tuple[bytes, int]:
    """A whole body with every tensor as bytes, and how much of it is JSON; ``fields`` stand beside ``inputs``."""
    parts = [described(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()]
    head = json.dumps({"inputs": [part for part, _ in parts], **fields}).encode()
    return head + b"".join(raw for _, raw in parts), len(head)


def json_request(inputs: Mapping[str, Any], datatypes: Mapping[str, str] | None = None, **fields: Any) -> bytes:
    """The same with every tensor as JSON data, flat."""
    listed = []
    for name, value in inputs.items():
        if name == "adapter":
            listed.append({"name": name, "shape": [len(value)], "datatype": "BYTES", "data": list(value)})
            continue
        array, datatype = np.asarray(value), (datatypes or {}).get(name) or USUAL[name]
        data = array.flatten().tolist()
        listed.append({"name": name, "shape": list(array.shape), "datatype": datatype, "data": data})
    return json.dumps({"inputs": listed, **fields}).encode()


def output(answer: httpx.Response) -> tuple[dict[str, Any], Array]:
    """The JSON of an answer, and its one output as float32."""
    length = answer.headers.get("inference-header-content-length")
    head = json.loads(answer.content[: None if length is None else int(length)])
    [told] = head["outputs"]
    if length is None:
        return head, np.array(told["data"], np.float32).reshape(told["shape"])
    raw = answer.content[int(length) :]
    assert told["parameters"]["binary_data_size"] == len(raw)
    return head, np.frombuffer(raw, NUMPY[told["datatype"]]).astype(np.float32).reshape(told["shape"])
