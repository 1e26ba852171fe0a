"""Small random adapters written by hand in every layout, beside the values that the formula needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moelet.layer.adapter import Adapter, LoraWeights
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.errors import AdapterRefusedError
from moelet.layer.spec import LayerSpec, ModelSpec

HIDDEN, WIDTH, SHARED, EXPERTS, RANK = 40, 24, 56, 5, 3
LAYERS = (1, 2)

PREFIX = "base_model.model.model."

LAYOUTS = (
    "per_expert",
    "mixtral",
    "fused_per_expert",
    "stacked",
    "stacked_fused",
    "shared_outer",
    "shared_outer_fused",
    "packed",
    "packed_swapped",
)
_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_ONE_A = {"fused_per_expert", "stacked_fused", "shared_outer_fused", "packed", "packed_swapped"}
PACKED_CONFIG = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}


def moe_model(
    *,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    experts: int = EXPERTS,
    shared: int = 0,
    layers: tuple[int, ...] = LAYERS,
) -> ModelSpec:
    """Four layers, of which 0 is dense, 3 was left out, and ``layers`` are served."""
    specs = {
        index: LayerSpec(
            index=index,
            hidden_size=hidden,
            intermediate_size=width,
            num_experts=experts,
            top_k=1,
            shared_intermediate_size=shared,
        )
        for index in layers
    }
    skipped = {0: "it is dense", 3: "it was left out"}
    return ModelSpec(
        name="small", model_type="qwen3_moe", path=Path("small"), num_hidden_layers=4, layers=specs, skipped=skipped
    )


@dataclass(frozen=True)
class Lora:
    """A ``[E|1, r, in]`` and B ``[E|1, out, r]`` of one projection, bf16."""

    a: Tensor
    b: Tensor

    def delta(self, expert: int, scaling: float) -> Tensor:
        """``scaling * B_e @ A_e`` in float64."""
        a, b = (side[expert if len(side) > 1 else 0].double() for side in (self.a, self.b))
        return scaling * (b @ a)


Layer = dict[str, Lora]
"""The projections ``gate``, ``up`` and ``down`` of one layer."""


def draw(layout: str, spec: LayerSpec, *, rank: int = RANK, seed: int = 0) -> Layer:
    """Random LoRA on every projection of ``spec``, of the kind that ``layout`` can hold; gate's B is never up's."""
    seeded = torch.Generator().manual_seed(1000 * spec.index + seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seeded).bfloat16()

    hidden, width, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    outer = 1 if layout.startswith("shared_outer") else experts
    gate_a, up_a = random(outer, rank, hidden), random(outer, rank, hidden)
    return {
        "gate": Lora(gate_a, random(experts, width, rank)),
        "up": Lora(gate_a if layout in _ONE_A else up_a, random(experts, width, rank)),
        "down": Lora(random(experts, rank, width), random(outer, hidden, rank)),
    }


def tensors_of(layout: str, layer: int, loras: Mapping[str, Lora], *, prefix: str = PREFIX) -> dict[str, Tensor]:
    """What ``layout`` stores for ``loras``: all projections, only down, or only gate and up (or one, where it can)."""
    if layout.startswith("packed"):
        return _packed(f"{prefix}layers.{layer}.mlp.experts", loras, swapped=layout == "packed_swapped")
    experts = f"{prefix}layers.{layer}.{'block_sparse_moe' if layout == 'mixtral' else 'mlp'}.experts"
    names = _MIXTRAL if layout == "mixtral" else _NAMES
    modules = {names[projection]: lora for projection, lora in loras.items()}
    if layout in _ONE_A and "gate" in loras:
        gate, up = modules.pop("gate_proj"), modules.pop("up_proj")
        modules["gate_up_proj"] = Lora(gate.a, torch.cat([gate.b, up.b], dim=1))
    tensors = {}
    for name, lora in modules.items():
        if layout in ("per_expert", "mixtral", "fused_per_expert"):
            for expert in range(len(lora.a)):
                tensors |= _pair(f"{experts}.{expert}.{name}", lora.a[expert], lora.b[expert])
        else:
            tensors |= _pair(f"{experts}.{name}", lora.a, lora.b)
    return tensors


def _pair(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": a.clone().contiguous(), f"{module}.lora_B.weight": b.clone().contiguous()}


def _packed(experts: str, loras: Mapping[str, Lora], *, swapped: bool) -> dict[str, Tensor]:
    """One wrapper is ``experts``; of two the inner one (gate_up) is ``experts.base_layer``."""
    tensors = {}
    if "gate" in loras:
        fused = Lora(loras["gate"].a, torch.cat([loras["gate"].b, loras["up"].b], dim=1))
        tensors |= _pair(f"{experts}.base_layer" if "down" in loras else experts, *pack(fused, swapped=swapped))
    if "down" in loras:
        tensors |= _pair(experts, *pack(loras["down"], swapped=swapped))
    return tensors


def pack(lora: Lora, *, swapped: bool) -> tuple[Tensor, Tensor]:
    """PEFT's 2-D A and B, element by element: row ``e*r + k`` of A, column ``k*E + e`` of B."""
    experts, rank, _ = lora.a.shape
    first, second = (lora.b.mT, lora.a.mT) if swapped else (lora.a, lora.b)
    a = torch.empty(rank * experts, first.shape[2], dtype=first.dtype)
    b = torch.empty(second.shape[1], rank * experts, dtype=first.dtype)
    for e in range(experts):
        for k in range(rank):
            a[e * rank + k] = first[e, k]
            b[:, k * experts + e] = second[e, :, k]
    return a, b


def write_folder(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """``folder`` with ``tensors`` and a configuration of rank ``RANK`` and alpha 6, ``config`` over it."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "target_modules": ["gate_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def write_layout(folder: Path, layout: str, model: ModelSpec, *, rank: int = RANK, **config: Any) -> dict[int, Layer]:
    """An adapter of ``layout`` on every layer of ``model``; what was drawn, by layer."""
    drawn = {index: draw(layout, spec, rank=rank) for index, spec in model.layers.items()}
    tensors: dict[str, Tensor] = {}
    for index, loras in drawn.items():
        tensors |= tensors_of(layout, index, loras)
    extra = PACKED_CONFIG if layout.startswith("packed") else {}
    write_folder(folder, tensors, **({"r": rank} | extra | config))
    return drawn


def delta_of(weights: LoraWeights | None, expert: int) -> Tensor:
    """What loaded weights add to an expert's ``[out, in]``, in float64, from what lies below its true rank."""
    assert weights is not None
    rank = int(weights.ranks[expert])
    a, b = (side[expert if len(side) > 1 else 0].double() for side in (weights.a, weights.b))
    assert not a[rank:].any()
    assert not b[:, rank:].any()
    return float(weights.scaling[expert]) * (b[:, :rank] @ a[:rank])


def assert_same_delta(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    """``found`` is ``wanted`` to ``tolerance`` of its norm: the scaling is fp32."""
    assert found.shape == wanted.shape
    error = (found - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.3e}"


def assert_adapter_is(adapter: Adapter, drawn: Mapping[int, Layer], scaling: float) -> None:
    """``adapter`` changes exactly the layers and projections of ``drawn``, by the formula."""
    assert set(adapter.layers) == set(drawn)
    for index, loras in drawn.items():
        found = dict(adapter.layers[index].items())
        assert set(found) == set(loras)
        for projection, lora in loras.items():
            for expert in range(len(found[projection].ranks)):
                assert_same_delta(delta_of(found[projection], expert), lora.delta(expert, scaling))


def refusal(folder: Path, model: ModelSpec, *, max_rank: int = 8, **options: Any) -> AdapterRefusedError:
    """The error with which ``load_adapter`` refuses ``folder``; it must."""
    with pytest.raises(AdapterRefusedError) as caught:
        load_adapter(folder, model, max_rank=max_rank, **options)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    return caught.value
