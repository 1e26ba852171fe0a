"""The two layers that bits are compared on, one small and odd, one of a real size, with batches and adapters."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from moelet.graphs.buffers import RoutingInput
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec, RoutingSpec
from random_layers import random_adapter, random_batch

SMALL = LayerSpec(
    index=0,
    hidden_size=328,
    intermediate_size=200,
    num_experts=12,
    top_k=3,
    routing=RoutingSpec(renormalize=True),
    shared_intermediate_size=300,
    shared_gated=True,
)
REAL = LayerSpec(index=0, hidden_size=2048, intermediate_size=768, num_experts=32, top_k=8)
SPECS = {"small": SMALL, "real": REAL}

SLOTS = [0, -1, 2, 1, 3]
"""The slots that tokens take in turn; the last is an empty one."""


@cache
def some_adapters(spec: LayerSpec) -> tuple[Adapter | None, ...]:
    """Three adapters that differ in rank and layout, and an empty slot; the same objects at every call."""
    return (
        random_adapter(spec, 1, rank=3),
        random_adapter(spec, 2, rank=8, shared_outer=True),
        random_adapter(spec, 3, rank=17),
        None,
    )


def batch_of(spec: LayerSpec, tokens: int, routing: RoutingInput = RoutingInput.TOPK, *, lora: bool) -> LayerBatch:
    """A batch routed as asked, a tenth of its choices dropped where it is routed by top-k."""
    batch = random_batch(spec, tokens, seed=tokens, slots=SLOTS if lora else None, drop=0.1)
    if routing is RoutingInput.TOPK:
        return batch
    logits = torch.randn(tokens, spec.num_experts, generator=torch.Generator().manual_seed(tokens))
    sent = logits if routing is RoutingInput.LOGITS else None
    return replace(batch, topk_ids=None, topk_weights=None, router_logits=sent)


def rows_of(batch: LayerBatch, order: Tensor) -> LayerBatch:
    """The tokens ``order`` of a batch."""
    parts = {name: getattr(batch, name) for name in ("topk_ids", "topk_weights", "router_logits", "token_slots")}
    chosen = {name: None if tensor is None else tensor[order].contiguous() for name, tensor in parts.items()}
    return replace(batch, hidden_states=batch.hidden_states[order].contiguous(), **chosen)
