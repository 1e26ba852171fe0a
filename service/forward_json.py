"""The JSON form of a forward: a body to a ``Call``, an ``Answer`` to a body, a whole array at a time."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from ..layer.engine import LayerBatch
from ..layer.errors import RequestError
from ..layer.spec import LayerSpec
from .call import Answer, Call, name_tokens

Array = np.ndarray[Any, np.dtype[Any]]
FIELDS = ("hidden_states", "topk_ids", "topk_weights", "router_logits", "adapter", "adapters")
JSON_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
MOST_DIMENSIONS = 8
"""Of nested lists, how many levels are told when they are too many."""


def load_object(body: bytes) -> dict[str, Any]:
    """A JSON object; bare ``NaN``, ``Infinity`` and ``-Infinity`` are numbers. Raises ``RequestError``."""
    try:
        value = _load(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body should be a JSON object, got {_kind(value)}")
    return value


def parse_forward(body: bytes, spec: LayerSpec) -> Call:
    """The call that ``body`` asks of the layer ``spec``. Numbers are read as float32 and rounded once to
    bf16 where that is what the layer takes. Raises ``RequestError`` naming the field at fault."""
    sent = load_object(body)
    if unknown := next((name for name in sent if name not in FIELDS), None):
        raise RequestError(f"unknown field {unknown!r}: the fields are {', '.join(FIELDS)}", unknown)
    hidden = _matrix(sent, "hidden_states", None, spec.hidden_size)
    if hidden is None:
        raise RequestError("hidden_states is required and was not sent", "hidden_states")
    tokens = len(hidden)
    ids, weights = (_matrix(sent, name, tokens, spec.top_k) for name in ("topk_ids", "topk_weights"))
    logits = _matrix(sent, "router_logits", tokens, spec.num_experts)
    batch = LayerBatch(
        layer=spec.index,
        hidden_states=_floats(hidden).to(torch.bfloat16),
        topk_ids=None if ids is None else _expert_ids(ids, spec.num_experts),
        topk_weights=None if weights is None else _floats(weights),
        router_logits=None if logits is None else _floats(logits),
    )
    batch.check(spec, max_loras=0)
    names, token_names = name_tokens(tokens, _name(sent.get("adapter")), _names(sent.get("adapters")))
    return Call(batch, names, token_names)


def render_forward(answer: Answer) -> bytes:
    """The body of an answer; NaN and infinities are ``null``."""
    return orjson.dumps(
        {
            "hidden_states": answer.hidden_states.float().contiguous().numpy(),
            "layer": answer.layer,
            "num_tokens": len(answer.hidden_states),
            "adapter_versions": answer.adapter_versions,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if b"NaN" not in body and b"Infinity" not in body:
            raise
        return json.loads(body)


def _matrix(sent: Mapping[str, Any], field: str, rows: int | None, columns: int) -> Array | None:
    """The numbers of ``field``, ``[rows, columns]`` (any number of rows for None), or None where it is absent.

    Kinds and lengths are looked at before numpy is: it would make strings of everything beside a
    string, each as wide as the longest.
    """
    value = sent.get(field)
    if value is None:
        return None
    wanted = f"{field} should be {'T' if rows is None else rows} rows of {columns} numbers"
    if not isinstance(value, list):
        raise RequestError(f"{wanted}, got {_kind(value)}", field)
    if not value and not rows:
        return np.empty((0, columns), np.int64)
    if _is_ragged(value):
        raise RequestError(f"{wanted}, got rows of different lengths", field)
    shape = _shape(value)
    if shape != [len(value) if rows is None else rows, columns]:
        raise RequestError(f"{wanted}, got the shape {shape}", field)
    strangers = {kind for kind in set(map(type, chain.from_iterable(value))) if kind not in (int, float)}
    array = None if strangers else np.array(value)
    if array is None or array.dtype.kind not in "iuf":
        found = sorted({JSON_KINDS.get(kind, "null") for kind in strangers}) or ["a huge number"]
        raise RequestError(f"{wanted}, got {' and '.join(found)} among them", field)
    return array


def _is_ragged(value: list[Any]) -> bool:
    kinds = set(map(type, value))
    return list in kinds and (len(kinds) > 1 or len(set(map(len, value))) > 1)


def _shape(value: Any) -> list[int]:
    """The lengths of nested lists, by the first of each; rows are alike unless told otherwise."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < MOST_DIMENSIONS:
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _floats(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.float64)).to(torch.float32)


def _expert_ids(array: Array, num_experts: int) -> Tensor:
    if array.dtype.kind == "f":
        wanted = f"topk_ids should be whole numbers in -1..{num_experts - 1}"
        raise RequestError(f"{wanted}, got fractions, NaN or far larger ones among them", "topk_ids")
    if array.size and (array.min() < -1 or array.max() >= num_experts):
        wrong = array.min() if array.min() < -1 else array.max()
        raise RequestError(f"topk_ids must lie in -1..{num_experts - 1}, got {wrong}", "topk_ids")
    return torch.from_numpy(array.astype(np.int32))


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"adapter should be a name or null, got {_kind(value)}", "adapter")
    return value


def _names(value: Any) -> list[str | None] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise RequestError(f"adapters should be a list of names or nulls, got {_kind(value)}", "adapters")
    if strangers := [x for x in value if not (x is None or isinstance(x, str))]:
        raise RequestError(f"adapters should be a list of names or nulls, got {_kind(strangers[0])} in it", "adapters")
    return value


def _kind(value: Any) -> str:
    return JSON_KINDS.get(type(value), "null")
