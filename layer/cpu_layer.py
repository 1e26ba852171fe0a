"""The layer on the CPU: slot rows sorted by expert and adapter, one gated MLP at a time, summed in fixed order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from .adapter import LayerAdapter, LoraWeights
from .engine import LayerBatch
from .routing import route_batch
from .spec import LayerSpec
from .tiles import elementwise, linear
from .weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start .. stop`` of one expert that share an adapter."""

    start: int
    stop: int
    adapter: LayerAdapter
    expert: int
    prefix: str = ""

    def add_delta(self, projection: str, x: Tensor, out: Tensor) -> None:
        """Add this segment's LoRA of ``projection`` on ``x`` to its rows of ``out``."""
        weights: LoraWeights | None = getattr(self.adapter, self.prefix + projection)
        if weights is None or (rank := int(weights.ranks[self.expert])) == 0:
            return
        a = weights.a[self.expert if weights.a.shape[0] > 1 else 0, :rank]
        b = weights.b[self.expert if weights.b.shape[0] > 1 else 0, :, :rank]
        rows = slice(self.start, self.stop)
        out[rows] += linear(linear(x[rows], a), b) * weights.scaling[self.expert]


def layer_output(
    spec: LayerSpec, weights: LayerWeights, batch: LayerBatch, adapters: Mapping[int, LayerAdapter]
) -> Tensor:
    """The output of a layer, fp32 ``[T, H]``, not yet rounded; ``adapters`` by slot."""
    ids, topk_weights = route_batch(spec, weights, batch)
    slots = torch.full((batch.num_tokens,), -1) if batch.token_slots is None else batch.token_slots
    hidden = batch.hidden_states.float()
    down = _routed_experts(spec, weights, hidden, ids, slots, adapters)
    out = _finalize(spec, down, ids, topk_weights)
    if spec.holds_shared_experts:
        out += _shared_experts(weights, hidden, slots, adapters)
    return out


def _routed_experts(
    spec: LayerSpec,
    weights: LayerWeights,
    hidden: Tensor,
    ids: Tensor,
    slots: Tensor,
    adapters: Mapping[int, LayerAdapter],
) -> Tensor:
    """The experts' outputs, fp32 ``[T, top_k, H]``; what is not local stays zero."""
    down = hidden.new_zeros(ids.numel(), spec.hidden_size)
    expert_of_row = ids.flatten()
    slot_of_row = slots.repeat_interleave(spec.top_k)
    for expert, rows in _groups(expert_of_row):
        local = expert - spec.local_expert_offset
        if not 0 <= local < spec.num_local_experts:
            continue
        order, segments = _by_adapter(rows, slot_of_row[rows], adapters, expert)
        x = hidden[order // spec.top_k]
        down[order] = _gated_mlp(x, weights.gate_up[local], weights.down[local], segments)
    return down.view(*ids.shape, spec.hidden_size)


def _shared_experts(
    weights: LayerWeights, hidden: Tensor, slots: Tensor, adapters: Mapping[int, LayerAdapter]
) -> Tensor:
    """The shared experts' output, fp32 ``[T, H]``, through their sigmoid gate where there is one."""
    assert weights.shared_gate_up is not None
    assert weights.shared_down is not None
    order, segments = _by_adapter(torch.arange(len(hidden)), slots, adapters, 0, "shared_")
    out = torch.empty_like(hidden)
    out[order] = _gated_mlp(hidden[order], weights.shared_gate_up, weights.shared_down, segments)
    if weights.shared_gate is not None:
        out *= elementwise(torch.sigmoid, linear(hidden, weights.shared_gate))
    return out


def _groups(keys: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each value (-1 or more) of ``keys`` with the positions where it stands, both ascending."""
    order = keys.argsort(stable=True)
    start = 0
    for value, count in enumerate((keys + 1).bincount().tolist(), start=-1):
        if count > 0:
            yield value, order[start : start + count]
        start += count


def _by_adapter(
    rows: Tensor, slots: Tensor, adapters: Mapping[int, LayerAdapter], expert: int, prefix: str = ""
) -> tuple[Tensor, list[Segment]]:
    """``rows`` sorted by their ``slots``, and the segments that have an adapter."""
    if not adapters:
        return rows, []
    sorted_rows: list[Tensor] = []
    segments: list[Segment] = []
    start = 0
    for slot, places in _groups(slots):
        stop = start + len(places)
        if slot in adapters:
            segments.append(Segment(start, stop, adapters[slot], expert, prefix))
        sorted_rows.append(rows[places])
        start = stop
    return torch.cat(sorted_rows), segments


def _gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, segments: Sequence[Segment]) -> Tensor:
    gate, up = linear(x, gate_up).chunk(2, dim=1)
    for segment in segments:
        segment.add_delta("gate", x, gate)
        segment.add_delta("up", x, up)
    act = elementwise(silu, gate) * up
    out = linear(act, down)
    for segment in segments:
        segment.add_delta("down", act, out)
    return out


def _finalize(spec: LayerSpec, down: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
    """``sum_k topk_weight[t, k] * down[t, k]`` over the local choices, in the order of k."""
    local = (ids >= spec.local_expert_offset) & (ids < spec.local_expert_end)
    scale = topk_weights.where(local, 0.0)
    out = torch.zeros_like(down[:, 0])
    for k in range(spec.top_k):
        # Two roundings, not a fused one: fusing is up to the vectoriser and would depend on the place.
        out += down[:, k] * scale[:, k, None]
    return out
