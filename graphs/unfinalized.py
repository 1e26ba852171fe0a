"""A forward before its last step: expert outputs by permuted row, their weights, and where each choice lies."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layer.engine import LayerBatch
from .arena import Arena
from .buffers import InputLayout
from .geometry import Geometry
from .pool import Runnable, Variant


class Unfinalized(NamedTuple):
    """What ``finalize`` sums: ``out[t] = sum_k expert_weights[t, k] * down[places[t, k]]`` over places that are not -1.

    ``down``            bf16 ``[rows, H]``: the down output, its LoRA delta added where there is one; zero in rows
                        that no choice lies in
    ``expert_weights``  fp32 ``[T, choices]``: of the top-k choices, then of the shared experts
    ``places``          int32 ``[T, choices]``: the expanded-to-permuted map, -1 without a local expert
    """

    down: Tensor
    expert_weights: Tensor
    places: Tensor


def read_unfinalized(geometry: Geometry, batch: LayerBatch, runnable: Runnable) -> Unfinalized:
    """The triple of the forward that ``runnable`` has just run; the main stream must have been waited for."""
    variant, arena, plan = runnable.variant, runnable.arena, runnable.program.plan
    tokens, hidden = batch.num_tokens, geometry.hidden_size
    places = arena.read("places")[: tokens * geometry.choices].view(tokens, geometry.choices)
    if plan.keeps_delta_apart and variant.lora:
        rows = arena.read("down_sums")[:, :hidden]
        adapted = places[batch.token_slots >= 0] if batch.token_slots is not None else places[:0]
        adapted = adapted[adapted >= 0].long()
        rows[adapted] += arena.read("down_delta")[adapted, :hidden].float()
        rows = rows.bfloat16()
    else:
        rows = arena.read("down")[:, :hidden]
    down = torch.zeros_like(rows)
    used = places[places >= 0].long()
    down[used] = rows[used]
    return Unfinalized(down, _weights(geometry, batch, variant, arena), places)


def _weights(geometry: Geometry, batch: LayerBatch, variant: Variant, arena: Arena) -> Tensor:
    tokens = batch.num_tokens
    if "topk_weights" in InputLayout(geometry, variant.num_tokens, variant.routing).fields:
        assert batch.topk_weights is not None
        routed = batch.topk_weights
    else:
        routed = arena.read("routed_weights")[:tokens]
    shared = torch.ones(tokens, geometry.num_shared)
    if geometry.shared_gated:
        shared *= arena.read("shared_weights")[:tokens, None]
    return torch.cat([routed, shared], dim=1)
