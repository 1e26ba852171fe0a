"""Small random layers, batches and adapters, gate never like up and every width another, for the tests."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec, ModelSpec, RoutingMethod, RoutingSpec
from moelet.layer.weights import LayerWeights

HIDDEN, WIDTH, EXPERTS, TOP_K, SHARED = 72, 40, 6, 3, 56

SPEC = LayerSpec(index=2, hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
SHARED_SPEC = LayerSpec(
    index=2,
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_experts=EXPERTS,
    top_k=TOP_K,
    shared_intermediate_size=SHARED,
    shared_gated=True,
)

GROUPED_SPEC = replace(
    SHARED_SPEC,
    shared_gated=False,
    routing=RoutingSpec(
        method=RoutingMethod.SIGMOID_GROUPED,
        renormalize=True,
        num_groups=3,
        topk_groups=2,
        has_correction_bias=True,
        routed_scaling_factor=2.5,
    ),
)


def model_of(spec: LayerSpec) -> ModelSpec:
    return ModelSpec(
        name="random",
        model_type="qwen3_moe",
        path=Path("random"),
        num_hidden_layers=spec.index + 1,
        layers={spec.index: spec},
        skipped={0: "dense"},
    )


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator, device=generator.device) * scale).bfloat16()


def random_weights(spec: LayerSpec, seed: int = 0, *, device: str = "cpu") -> LayerWeights:
    """Weights of every expert of ``spec`` (which holds them all), scaled so that outputs are near 1."""
    g = torch.Generator(device).manual_seed(seed)
    hidden, width, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    shared = spec.shared_intermediate_size
    return LayerWeights(
        gate_up=normal(g, experts, 2 * width, hidden, scale=hidden**-0.5),
        down=normal(g, experts, hidden, width, scale=2 * width**-0.5),
        router=normal(g, experts, hidden, scale=hidden**-0.5),
        correction_bias=torch.rand(experts, generator=g, device=device) if spec.routing.has_correction_bias else None,
        shared_gate_up=normal(g, 2 * shared, hidden, scale=hidden**-0.5) if shared else None,
        shared_down=normal(g, hidden, shared, scale=2 * shared**-0.5) if shared else None,
        shared_gate=normal(g, 1, hidden, scale=hidden**-0.5) if spec.shared_gated else None,
    )


def slice_weights(spec: LayerSpec, weights: LayerWeights) -> LayerWeights:
    """What the slice ``spec`` holds of the whole layer's ``weights``."""
    local = slice(spec.local_expert_offset, spec.local_expert_end)
    shared = spec.holds_shared_experts
    return LayerWeights(
        gate_up=weights.gate_up[local],
        down=weights.down[local],
        router=weights.router,
        correction_bias=weights.correction_bias,
        shared_gate_up=weights.shared_gate_up if shared else None,
        shared_down=weights.shared_down if shared else None,
        shared_gate=weights.shared_gate if shared else None,
    )


def random_batch(
    spec: LayerSpec, num_tokens: int, seed: int = 0, *, slots: list[int] | None = None, drop: float = 0.0
) -> LayerBatch:
    """Tokens with ``top_k`` different experts each, a share ``drop`` of the choices -1.

    ``slots``: the adapter slots that tokens take in turn.
    """
    g = torch.Generator().manual_seed(seed + 1000)
    ids = torch.rand(num_tokens, spec.num_experts, generator=g).argsort(dim=1)[:, : spec.top_k].to(torch.int32)
    ids[torch.rand(ids.shape, generator=g) < drop] = -1
    return LayerBatch(
        layer=spec.index,
        hidden_states=normal(g, num_tokens, spec.hidden_size),
        topk_ids=ids.contiguous(),
        topk_weights=torch.rand(num_tokens, spec.top_k, generator=g),
        token_slots=None if slots is None else torch.tensor((slots * num_tokens)[:num_tokens], dtype=torch.int32),
    )


def random_lora(
    g: torch.Generator, experts: int, rank: int, wide: int, out: int, *, one_a: bool = False, one_b: bool = False
) -> LoraWeights:
    """LoRA of ``experts`` experts whose delta is as large as the weight's own product."""
    return LoraWeights(
        a=normal(g, 1 if one_a else experts, rank, wide, scale=wide**-0.5),
        b=normal(g, 1 if one_b else experts, out, rank, scale=rank**-0.5),
        scaling=torch.rand(experts, generator=g, device=g.device) + 0.5,
        ranks=torch.full((experts,), rank, dtype=torch.int32, device=g.device),
    )


def random_adapter(spec: LayerSpec, seed: int = 0, *, rank: int = 8, shared_outer: bool = False) -> Adapter:
    """An adapter on every projection of ``spec``, ``down`` of rank ``rank + 1``."""
    g = torch.Generator().manual_seed(seed + 2000)
    hidden, width, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    shared = spec.shared_intermediate_size
    layer = LayerAdapter(
        gate=random_lora(g, experts, rank, hidden, width, one_a=shared_outer),
        up=random_lora(g, experts, rank, hidden, width, one_a=shared_outer),
        down=random_lora(g, experts, rank + 1, width, hidden, one_b=shared_outer),
        shared_gate=random_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_up=random_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_down=random_lora(g, 1, rank, shared, hidden) if shared else None,
    )
    return adapter_of(spec, layer, rank)


def adapter_of(spec: LayerSpec, layer: LayerAdapter, rank: int = 8) -> Adapter:
    return Adapter(path=Path("random"), rank=rank, lora_alpha=8.0, scaling=8.0 / rank, layers={spec.index: layer})
