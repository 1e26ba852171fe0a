"""An inference request to a ``Call`` and an ``Answer`` to a response: bytes in, bytes out, no HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from ...layer.engine import LayerBatch
from ...layer.errors import RequestError
from ...layer.spec import LayerSpec
from ..call import Answer, Call, name_tokens
from ..json_arrays import expert_ids, load_object
from .header import BINARY_SIZE, OUTPUT, InferRequest, Input, read_header, shown
from .tensors import DTYPES, read_matrix, read_names

ADAPTER = "adapter"
DATATYPES: Mapping[str, tuple[str, ...]] = {
    OUTPUT: ("BF16", "FP16", "FP32"),
    "topk_ids": ("INT32", "INT64"),
    "topk_weights": ("FP32",),
    "router_logits": ("FP32",),
    ADAPTER: ("BYTES",),
}
"""The inputs of a layer with the datatypes that each may have, the usual one first."""

MODEL_VERSION = "1"
"""Of every layer: a checkpoint does not change while it is served."""


@dataclass(frozen=True, slots=True)
class Inference:
    """A request that was read: the ``call``, and how its answer is to be written."""

    call: Call
    request: InferRequest


def read_inference(body: memoryview, header_length: int | None, spec: LayerSpec) -> Inference:
    """What ``body`` asks of the layer ``spec``; ``header_length`` bytes of it are JSON (None: all), and
    tensors lie behind.

    ``body`` is writable, and the call's tensors are views of it where their datatype is the layer's.
    Raises ``RequestError`` naming the field at fault.
    """
    json_length = len(body) if header_length is None else header_length
    if json_length > len(body):
        wanted = f"Inference-Header-Content-Length should be at most the body's {len(body)} bytes"
        raise RequestError(f"{wanted}, got {json_length}")
    request = read_header(load_object(bytes(body[:json_length])))
    values = _split(body[json_length:], request.inputs)
    inputs = {given.name: given for given in request.inputs}
    num_tokens = _check(inputs, request.inputs, spec)
    batch = _batch(inputs, values, spec)
    batch.check(spec, max_loras=0)
    names = read_names(inputs[ADAPTER], values[ADAPTER]) if ADAPTER in inputs else None
    if request.adapter is not None and ADAPTER in inputs:
        raise RequestError("send adapter as an input or as a parameter, not both", ADAPTER)
    if isinstance(names, list):
        if len(names) == 1:
            names = names[0]
        else:
            return Inference(Call(batch, *name_tokens(num_tokens, None, names)), request)
    return Inference(Call(batch, *name_tokens(num_tokens, names or request.adapter or None, None)), request)


def write_answer(answer: Answer, request: InferRequest, model: str) -> tuple[list[bytes | memoryview], int | None]:
    """The body of the answer in pieces, and how much of it is JSON where tensors follow.

    In JSON, NaN and infinities are ``null``.
    """
    hidden = answer.hidden_states
    datatype = request.datatype or ("BF16" if request.binary else "FP32")
    output: dict[str, Any] = {"name": OUTPUT, "datatype": datatype, "shape": list(hidden.shape)}
    hidden = hidden.to(DTYPES[datatype])
    head: dict[str, Any] = {"model_name": model, "model_version": MODEL_VERSION, "outputs": [output]}
    head["parameters"] = {"adapter_versions": orjson.dumps(answer.adapter_versions).decode()}
    if request.id is not None:
        head["id"] = request.id
    if not request.binary:
        output["data"] = hidden.float().flatten().numpy()
        return [orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)], None
    values = bytes_of(hidden)
    output["parameters"] = {BINARY_SIZE: len(values)}
    written = orjson.dumps(head)
    return [written, values], len(written)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor where they lie, row-major."""
    array: np.ndarray[Any, Any] = tensor.contiguous().view(torch.uint8).numpy()
    return array.reshape(-1).data


def _split(binary: memoryview, inputs: tuple[Input, ...]) -> dict[str, memoryview]:
    """The bytes of each input, none where it brings JSON data; together they are all of ``binary``."""
    values: dict[str, memoryview] = {}
    place = 0
    for given in inputs:
        size = given.size or 0
        if size > len(binary) - place:
            wanted = f"{given.name} has {BINARY_SIZE} {size}"
            raise RequestError(f"{wanted}, but only {len(binary) - place} bytes are left behind the JSON", given.name)
        values[given.name] = binary[place : place + size]
        place += size
    if place != len(binary):
        raise RequestError(
            f"the inputs have {place} bytes as their {BINARY_SIZE} says, but {len(binary)} lie behind the JSON"
        )
    return values


def _check(inputs: Mapping[str, Input], sent: tuple[Input, ...], spec: LayerSpec) -> int:
    """How many tokens there are, once every input is known to be there once with a datatype and shape that fit."""
    for given in sent:
        if given.name not in DATATYPES:
            raise RequestError(f"unknown input {shown(given.name)}: the inputs are {', '.join(DATATYPES)}", "inputs")
        if given is not inputs[given.name]:
            raise RequestError(f"the input {given.name} is there twice", given.name)
        if given.datatype not in DATATYPES[given.name]:
            wanted = " or ".join(DATATYPES[given.name])
            raise RequestError(f"{given.name} should be {wanted}, got {shown(given.datatype)}", given.name)
    if OUTPUT not in inputs:
        raise RequestError(f"the input {OUTPUT} is required and was not sent", OUTPUT)
    widths = widths_of(spec)
    num_tokens = inputs[OUTPUT].shape[0] if inputs[OUTPUT].shape else 0
    for given in sent:
        fits = [(num_tokens,), (1,)] if given.name == ADAPTER else [(num_tokens, widths[given.name])]
        if given.shape not in fits:
            wanted = f"[{num_tokens}] or [1]" if given.name == ADAPTER else f"[T, {widths[given.name]}]"
            where = "" if given.name == OUTPUT else f", with T = {num_tokens} as in {OUTPUT}"
            got = f"{list(given.shape[:8])}{' and more' if len(given.shape) > 8 else ''}"
            raise RequestError(f"{given.name} should have the shape {wanted}{where}, got {got}", given.name)
    return num_tokens


def widths_of(spec: LayerSpec) -> dict[str, int]:
    """The second dimension of each input that has one."""
    return {
        OUTPUT: spec.hidden_size,
        "topk_ids": spec.top_k,
        "topk_weights": spec.top_k,
        "router_logits": spec.num_experts,
    }


def _batch(inputs: Mapping[str, Input], values: Mapping[str, memoryview], spec: LayerSpec) -> LayerBatch:
    def tensor(name: str) -> Tensor | None:
        return read_matrix(inputs[name], values[name], spec.num_experts) if name in inputs else None

    ids = tensor("topk_ids")
    return LayerBatch(
        layer=spec.index,
        hidden_states=read_matrix(inputs[OUTPUT], values[OUTPUT], spec.num_experts).to(torch.bfloat16),
        topk_ids=None if ids is None else _narrow(ids, spec.num_experts),
        topk_weights=tensor("topk_weights"),
        router_logits=tensor("router_logits"),
    )


def _narrow(ids: Tensor, num_experts: int) -> Tensor:
    """Expert ids as int32. Raises ``RequestError`` for those that are none, before any could wrap."""
    return ids if ids.dtype == torch.int32 else expert_ids(ids.numpy(), num_experts)
