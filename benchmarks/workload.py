"""Random layers, adapters and batches of the shapes that benchmarks run, and the exact output of each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.engine import LayerBatch
from moelet.layer.oracle import layer_forward
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights

ALL = "all"
"""As many adapters as there are slots, every token another than the one before."""
LORA_SCALING = 0.5


class Routing(StrEnum):
    """How tokens choose experts: alike, by Zipf's law, or all of them among the same eight local experts."""

    UNIFORM = "uniform"
    ZIPF = "zipf"
    EIGHT = "eight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one forward is asked to do; ``rank`` and ``adapters`` are 0 for the base layer alone."""

    num_tokens: int
    routing: Routing = Routing.UNIFORM
    rank: int = 0
    adapters: int | str = 0
    shared_outer: bool = False

    @property
    def lora(self) -> bool:
        """Whether any token has an adapter."""
        return self.rank > 0

    @property
    def layout(self) -> str | None:
        """The adapters' layout as results name it."""
        return ("shared_outer" if self.shared_outer else "per_expert") if self.lora else None


def normal(generator: torch.Generator, *shape: int, scale: float) -> Tensor:
    """Normally distributed bf16 on the generator's device."""
    empty = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return empty.normal_(0.0, scale, generator=generator)


def random_weights(spec: LayerSpec, generator: torch.Generator) -> LayerWeights:
    """Weights on the generator's device, scaled so that every step gives values near 1; the router, on the host, is
    zero: benchmarks send top-k."""
    experts, hidden, inter = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    shared = spec.shared_intermediate_size if spec.holds_shared_experts else 0
    gated = shared > 0 and spec.shared_gated
    return LayerWeights(
        gate_up=normal(generator, experts, 2 * inter, hidden, scale=hidden**-0.5),
        down=normal(generator, experts, hidden, inter, scale=2 * inter**-0.5),
        router=torch.zeros(spec.num_experts, hidden, dtype=torch.bfloat16),
        shared_gate_up=normal(generator, 2 * shared, hidden, scale=hidden**-0.5) if shared else None,
        shared_down=normal(generator, hidden, shared, scale=2 * shared**-0.5) if shared else None,
        shared_gate=normal(generator, 1, hidden, scale=hidden**-0.5) if gated else None,
    )


def _lora(g: torch.Generator, experts: int, rank: int, wide: int, out: int, outer: str = "") -> LoraWeights:
    return LoraWeights(
        a=normal(g, 1 if outer == "a" else experts, rank, wide, scale=wide**-0.5),
        b=normal(g, 1 if outer == "b" else experts, out, rank, scale=rank**-0.5),
        scaling=torch.full((experts,), LORA_SCALING),
        ranks=torch.full((experts,), rank, dtype=torch.int32),
    )


def random_adapter(spec: LayerSpec, rank: int, generator: torch.Generator, *, shared_outer: bool = False) -> Adapter:
    """An adapter on every projection, A and B on the generator's device."""
    g, experts, hidden, inter = generator, spec.num_experts, spec.hidden_size, spec.intermediate_size
    shared = spec.shared_intermediate_size if spec.holds_shared_experts else 0
    one_a, one_b = ("a", "b") if shared_outer else ("", "")
    layer = LayerAdapter(
        gate=_lora(g, experts, rank, hidden, inter, one_a),
        up=_lora(g, experts, rank, hidden, inter, one_a),
        down=_lora(g, experts, rank, inter, hidden, one_b),
        shared_gate=_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_up=_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_down=_lora(g, 1, rank, shared, hidden) if shared else None,
    )
    alpha = rank * LORA_SCALING
    return Adapter(path=Path("random"), rank=rank, lora_alpha=alpha, scaling=LORA_SCALING, layers={spec.index: layer})


def on_host(adapter: Adapter) -> Adapter:
    """``adapter`` as slots take it: its tensors on the host."""

    def moved(weights: LoraWeights) -> LoraWeights:
        return LoraWeights(**{field.name: getattr(weights, field.name).cpu() for field in fields(weights)})

    parts = adapter.layers.items()
    layers = {index: LayerAdapter(**{name: moved(weights) for name, weights in part.items()}) for index, part in parts}
    return replace(adapter, layers=layers)


def random_batches(spec: LayerSpec, workload: Workload, count: int, slots: int) -> list[LayerBatch]:
    """``count`` batches on the host, alike in hidden states and routing for workloads of one token count and routing,
    whatever their adapters; ``slots`` is what ``ALL`` goes through."""
    seed = 1000 * workload.num_tokens
    inputs = torch.Generator().manual_seed(seed)
    choices = torch.Generator().manual_seed(seed + 1)
    return [
        replace(_base_batch(spec, workload, inputs), token_slots=_token_slots(workload, slots, choices))
        for _ in range(count)
    ]


def _base_batch(spec: LayerSpec, workload: Workload, g: torch.Generator) -> LayerBatch:
    tokens = workload.num_tokens
    hidden = normal(g, tokens, spec.hidden_size, scale=1.0)
    # The k largest of log-probability plus Gumbel noise are a draw without replacement.
    noise = -torch.empty(tokens, spec.num_experts).exponential_(generator=g).log()
    ids = (_log_probabilities(spec, workload.routing, g) + noise).topk(spec.top_k).indices
    return LayerBatch(
        layer=spec.index,
        hidden_states=hidden,
        topk_ids=ids.to(torch.int32).contiguous(),
        topk_weights=torch.randn(tokens, spec.top_k, generator=g).softmax(dim=-1),
    )


def _log_probabilities(spec: LayerSpec, routing: Routing, g: torch.Generator) -> Tensor:
    experts = spec.num_experts
    if routing is Routing.UNIFORM:
        return torch.zeros(experts)
    if routing is Routing.ZIPF:
        return -torch.log(torch.randperm(experts, generator=g) + 1.0)
    # The eight are local; a top-k larger than what is local has to go on elsewhere.
    local = spec.local_expert_offset + torch.randperm(spec.num_local_experts, generator=g)
    scores = torch.full((experts,), -1e9)
    scores[local[: max(8, spec.top_k)]] = 0.0
    return scores


def _token_slots(workload: Workload, slots: int, g: torch.Generator) -> Tensor | None:
    if not workload.lora:
        return None
    tokens = workload.num_tokens
    if workload.adapters == ALL:
        return torch.arange(tokens, dtype=torch.int32) % slots
    return torch.randint(int(workload.adapters), (tokens,), generator=g, dtype=torch.int32)


def exact_output(spec: LayerSpec, weights: LayerWeights, adapters: list[Adapter], batch: LayerBatch) -> Tensor:
    """The float64 output of ``batch``, computed where the weights are and returned on the host."""
    device = weights.gate_up.device
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    slots = torch.full((batch.num_tokens,), -1) if batch.token_slots is None else batch.token_slots
    moved = LayerBatch(
        layer=batch.layer,
        hidden_states=batch.hidden_states.to(device),
        topk_ids=batch.topk_ids.to(device),
        topk_weights=batch.topk_weights.to(device),
        token_slots=slots.to(device),
    )
    return layer_forward(spec, weights, moved, adapters if batch.token_slots is not None else ()).cpu()


def relative_error(output: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of ``truth``; NaN where ``output`` holds one."""
    scale = float(truth.norm())
    distance = float((output.double() - truth.double()).norm())
    return distance / scale if scale else (0.0 if distance == 0.0 else math.inf)


def worst(errors: Sequence[float]) -> float | None:
    """The largest of ``errors``, NaN if any is; None of none."""
    if any(math.isnan(error) for error in errors):
        return math.nan
    return max(errors, default=None)
