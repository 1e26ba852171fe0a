"""An inference request to a ``Call`` and an ``Answer`` to a response: bytes in, bytes out, no HTTP."""

from functools import lru_cache
from typing import Any, NamedTuple

import orjson
import torch
from torch import Tensor

from ...layer.engine import LayerBatch
from ...layer.errors import RequestError
from ...layer.spec import LayerSpec
from ..call import Answer, Call, name_tokens
from ..json_arrays import expert_ids
from ..rows import octets_of
from .header import BINARY_SIZE, OUTPUT, InferRequest
from .layout import ADAPTER, REMEMBERED, Layout, LayoutReader, Place
from .tensors import DTYPES, read_matrix, read_names

MODEL_VERSION = "1"
"""Of every layer: a checkpoint does not change while it is served."""


class Inference(NamedTuple):
    """A request that was read: the ``call``, and how its answer is to be written.

    ``repeats``  it is what any request comes to that lies in the same memory with the same JSON: its one tensor is
                 looked at where it lies, if that is aligned
    """

    call: Call
    request: InferRequest
    repeats: bool


def read_inference(
    body: memoryview, header_length: int | None, spec: LayerSpec, read_layout: LayoutReader
) -> Inference:
    """What ``body`` asks of the layer ``spec``; ``header_length`` bytes of it are JSON (None: all), and
    tensors lie behind. ``read_layout`` is a reader for ``spec``.

    ``body`` is writable, and the call's tensors are views of it where their datatype is the layer's.
    Raises ``RequestError`` naming the field at fault.
    """
    json_length = len(body) if header_length is None else header_length
    if json_length > len(body):
        wanted = f"Inference-Header-Content-Length should be at most the body's {len(body)} bytes"
        raise RequestError(f"{wanted}, got {json_length}")
    layout = read_layout(bytes(body[:json_length]))
    layout.check_size(len(body) - json_length)
    binary = body[json_length:]
    batch = _batch(layout, binary, spec)
    if layout.needs_check:
        batch.check(spec, max_loras=0)
    return Inference(Call(batch, *_names(layout, binary)), layout.request, _is_one_view(layout))


def write_answer(answer: Answer, request: InferRequest, model: str) -> tuple[list[bytes | memoryview], int | None]:
    """The body of the answer in pieces, and how much of it is JSON where tensors follow.

    In JSON, NaN and infinities are ``null``.
    """
    datatype = request.datatype or ("BF16" if request.binary else "FP32")
    versions = orjson.dumps(answer.adapter_versions).decode() if answer.adapter_versions else "{}"
    shape = answer.rows.shape
    if not request.binary:
        output = {
            "name": OUTPUT,
            "datatype": datatype,
            "shape": shape,
            "data": _as(datatype, answer).float().flatten().numpy(),
        }
        return [orjson.dumps(_head(model, output, versions, request.id), option=orjson.OPT_SERIALIZE_NUMPY)], None
    values = answer.rows.octets if datatype == "BF16" else octets_of(_as(datatype, answer))
    write = _remembered_head if request.id is None else _binary_head
    written = write(model, datatype, shape, len(values), versions, request.id)
    return [written, values], len(written)


def _head(model: str, output: dict[str, Any], versions: str, request_id: str | None) -> dict[str, Any]:
    head: dict[str, Any] = {
        "model_name": model,
        "model_version": MODEL_VERSION,
        "outputs": (output,),
        "parameters": {"adapter_versions": versions},
    }
    return head if request_id is None else {**head, "id": request_id}


def _binary_head(
    model: str, datatype: str, shape: tuple[int, ...], size: int, versions: str, request_id: str | None
) -> bytes:
    """The JSON part of an answer whose output is ``size`` bytes behind it."""
    output = {"name": OUTPUT, "datatype": datatype, "shape": shape, "parameters": {BINARY_SIZE: size}}
    return orjson.dumps(_head(model, output, versions, request_id))


_remembered_head = lru_cache(REMEMBERED)(_binary_head)
"""For answers without an id of the client's, which are the same but for their values."""


def _as(datatype: str, answer: Answer) -> Tensor:
    return answer.hidden_states.to(DTYPES[datatype])


def _batch(layout: Layout, binary: memoryview, spec: LayerSpec) -> LayerBatch:
    def tensor(place: Place) -> Tensor:
        return read_matrix(place.given, binary[place.start : place.stop], spec.num_experts)

    places = layout.places
    hidden = tensor(places[OUTPUT])
    if hidden.dtype != torch.bfloat16:
        hidden = hidden.to(torch.bfloat16)
    if not layout.needs_check:  # no other tensor is there
        return LayerBatch(layer=spec.index, hidden_states=hidden)
    tensors = {name: tensor(place) for name, place in places.items() if name not in (OUTPUT, ADAPTER)}
    ids = tensors.get("topk_ids")
    return LayerBatch(
        layer=spec.index,
        hidden_states=hidden,
        topk_ids=None if ids is None else _narrow(ids, spec.num_experts),
        topk_weights=tensors.get("topk_weights"),
        router_logits=tensors.get("router_logits"),
    )


def _is_one_view(layout: Layout) -> bool:
    given = layout.places[OUTPUT].given
    return len(layout.places) == 1 and given.datatype == "BF16" and bool(given.size)


def _narrow(ids: Tensor, num_experts: int) -> Tensor:
    """Expert ids as int32. Raises ``RequestError`` for those that are none, before any could wrap."""
    return ids if ids.dtype == torch.int32 else expert_ids(ids.numpy(), num_experts)


def _names(layout: Layout, binary: memoryview) -> tuple[tuple[str, ...], Tensor | None]:
    """``Call.names`` and ``Call.token_names``."""
    place = layout.places.get(ADAPTER)
    if place is None:
        return name_tokens(layout.num_tokens, layout.request.adapter or None, None)
    names = read_names(place.given, binary[place.start : place.stop])
    if isinstance(names, list) and len(names) != 1:
        return name_tokens(layout.num_tokens, None, names)
    return name_tokens(layout.num_tokens, names[0] if isinstance(names, list) else names, None)
