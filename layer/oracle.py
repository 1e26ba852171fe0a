"""The layer written down plainly, in float64 or float32: what every engine's output is measured against."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from .adapter import Adapter, LayerAdapter, LoraWeights
from .engine import LayerBatch
from .routing import route_batch
from .spec import LayerSpec
from .weights import LayerWeights

Rounding = Literal["bf16"]
_Round = Callable[[Tensor], Tensor]


def layer_forward(
    spec: LayerSpec,
    weights: LayerWeights,
    batch: LayerBatch,
    adapters: Sequence[Adapter | None] = (),
    *,
    dtype: torch.dtype = torch.float64,
    rounding: Rounding | None = None,
) -> Tensor:
    """The output of one layer, ``[T, H]`` in ``dtype``, from the bf16 inputs of ``batch``.

    For token ``t`` and choice ``k`` with local expert ``e`` (``D(p)`` is the adapter's delta on
    projection ``p``, ``scaling[e] * (input @ A_e.T) @ B_e.T``, or nothing)::

        gate, up  = x W_gate_e.T + D(gate),  x W_up_e.T + D(up)
        act       = silu(gate) * up
        down      = act W_down_e.T + D(down)
        out[t]    = sum_k topk_weight[t, k] * down[t, k]  +  sigmoid(x shared_gate.T) * shared(x)

    A choice of -1 or of an expert held elsewhere contributes nothing, its LoRA included, shared A or
    B or not: every (token, choice) belongs to one slice of an expert-parallel group, so the slices'
    outputs sum to the whole. The shared experts belong to the slice where
    ``spec.holds_shared_experts``. ``adapters[s]`` is what is in slot ``s``; a token of an empty
    slot, or of an adapter that leaves this layer alone, has no delta.

    Which experts are chosen, and with what weights, is not this function's to judge: it asks
    ``routing`` in fp32, as the engines do, or takes the batch's own.

    With ``rounding="bf16"`` a value is rounded to bf16 (and kept in ``dtype``) exactly here:
    ``x W.T`` of gate, up and down (products of the base weights, LoRA not yet added); the LoRA
    hidden ``h = input @ A.T``; every delta after scaling; ``act``; and the output, once, after
    everything is summed. Sums of a product and its delta, silu, routing weights, the sigmoid and
    the sum over choices are not rounded.
    """
    rounded = _rounding(rounding)
    ids, topk_weights = route_batch(spec, weights, batch)
    hidden = batch.hidden_states.to(dtype)
    slots = torch.full((batch.num_tokens,), -1) if batch.token_slots is None else batch.token_slots
    layer_adapters = [a.layers.get(spec.index) if a is not None else None for a in adapters]

    down = hidden.new_zeros(batch.num_tokens, spec.top_k, spec.hidden_size)
    for expert in range(spec.local_expert_offset, spec.local_expert_end):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        local = expert - spec.local_expert_offset
        mlp = _Mlp(weights.gate_up[local], weights.down[local], expert, "", rounded)
        down[tokens, choices] = mlp(hidden[tokens], slots[tokens], layer_adapters)
    # A choice that contributes nothing does so even under a NaN or infinite weight.
    local_choice = (ids >= spec.local_expert_offset) & (ids < spec.local_expert_end)
    out = (topk_weights.to(dtype).where(local_choice, 0)[..., None] * down).sum(dim=1)

    if spec.holds_shared_experts:
        assert weights.shared_gate_up is not None
        assert weights.shared_down is not None
        shared = _Mlp(weights.shared_gate_up, weights.shared_down, 0, "shared_", rounded)
        out += _shared_scale(weights, hidden) * shared(hidden, slots, layer_adapters)
    return rounded(out)


class _Mlp:
    """One gated MLP, of a routed expert or of the shared ones, with the LoRA of each row's slot."""

    def __init__(self, gate_up: Tensor, down: Tensor, expert: int, prefix: str, rounded: _Round) -> None:
        self._gate, self._up = gate_up.chunk(2)
        self._down = down
        self._expert = expert
        self._prefix = prefix
        self._rounded = rounded

    def __call__(self, x: Tensor, slots: Tensor, adapters: Sequence[LayerAdapter | None]) -> Tensor:
        gate = self._project("gate", self._gate, x, slots, adapters)
        up = self._project("up", self._up, x, slots, adapters)
        act = self._rounded(silu(gate) * up)
        return self._project("down", self._down, act, slots, adapters)

    def _project(
        self, name: str, weight: Tensor, x: Tensor, slots: Tensor, adapters: Sequence[LayerAdapter | None]
    ) -> Tensor:
        out = self._rounded(x @ weight.to(x.dtype).T)
        for slot, adapter in enumerate(adapters):
            lora: LoraWeights | None = getattr(adapter, self._prefix + name, None)
            if lora is not None:
                rows = slots == slot
                out[rows] += self._delta(lora, x[rows])
        return out

    def _delta(self, lora: LoraWeights, x: Tensor) -> Tensor:
        rank = int(lora.ranks[self._expert])
        a = lora.a[self._expert if lora.a.shape[0] > 1 else 0, :rank].to(x.dtype)
        b = lora.b[self._expert if lora.b.shape[0] > 1 else 0, :, :rank].to(x.dtype)
        h = self._rounded(x @ a.T)
        return self._rounded(h @ b.T * lora.scaling[self._expert].to(x.dtype))


def _rounding(rounding: Rounding | None) -> _Round:
    if rounding is None:
        return lambda x: x
    return lambda x: x.to(torch.bfloat16).to(x.dtype)


def _shared_scale(weights: LayerWeights, hidden: Tensor) -> Tensor:
    if weights.shared_gate is None:
        return hidden.new_ones(hidden.shape[0], 1)
    return (hidden @ weights.shared_gate.to(hidden.dtype).T).sigmoid()
