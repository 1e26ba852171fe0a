"""The JSON form of a forward: a body to a ``Call``, an ``Answer`` to a body, a whole array at a time."""

from typing import Any

import orjson
import torch

from ..layer.engine import LayerBatch
from ..layer.errors import RequestError
from ..layer.spec import LayerSpec
from .call import Answer, Call, name_tokens
from .json_arrays import expert_ids, floats, kind, load_object, matrix

FIELDS = ("hidden_states", "topk_ids", "topk_weights", "router_logits", "adapter", "adapters")


def parse_forward(body: bytes, spec: LayerSpec) -> Call:
    """The call that ``body`` asks of the layer ``spec``. Numbers are read as float32 and rounded once to
    bf16 where that is what the layer takes. Raises ``RequestError`` naming the field at fault."""
    sent = load_object(body)
    if unknown := next((name for name in sent if name not in FIELDS), None):
        raise RequestError(f"unknown field {unknown!r}: the fields are {', '.join(FIELDS)}", unknown)
    if sent.get("hidden_states") is None:
        raise RequestError("hidden_states is required and was not sent", "hidden_states")
    hidden = matrix(sent["hidden_states"], "hidden_states", None, spec.hidden_size)
    tokens = len(hidden)
    widths = {"topk_ids": spec.top_k, "topk_weights": spec.top_k, "router_logits": spec.num_experts}
    given = {name: matrix(sent[name], name, tokens, widths[name]) for name in widths if sent.get(name) is not None}
    batch = LayerBatch(
        layer=spec.index,
        hidden_states=floats(hidden).to(torch.bfloat16),
        topk_ids=expert_ids(given["topk_ids"], spec.num_experts) if "topk_ids" in given else None,
        topk_weights=floats(given["topk_weights"]) if "topk_weights" in given else None,
        router_logits=floats(given["router_logits"]) if "router_logits" in given else None,
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


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"adapter should be a name or null, got {kind(value)}", "adapter")
    return value


def _names(value: Any) -> list[str | None] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise RequestError(f"adapters should be a list of names or nulls, got {kind(value)}", "adapters")
    if strangers := [x for x in value if not (x is None or isinstance(x, str))]:
        raise RequestError(f"adapters should be a list of names or nulls, got {kind(strangers[0])} in it", "adapters")
    return value
