"""The direct kernels of few tokens on a real GPU: the bits of the sorted ones, whatever experts the tokens chose."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_cases import SPECS, some_adapters
from gpu_engines import Gpu, GpuLayer, gpu, same_bits
from moelet.graphs.program import Plan
from moelet.layer.spec import LayerSpec
from random_layers import random_batch

pytestmark = pytest.mark.gpu

SHAPES = (1, 2, 3, 8, 12, 16)
SLICE = replace(SPECS["real"], num_local_experts=8, local_expert_offset=16)
THIN = replace(SPECS["real"], num_local_experts=2, local_expert_offset=4)
SHARED_SLICE = replace(SPECS["small"], num_local_experts=5, local_expert_offset=0)
WIDE = LayerSpec(index=0, hidden_size=2880, intermediate_size=1408, num_experts=300, top_k=10)
LARGE = LayerSpec(index=0, hidden_size=520, intermediate_size=2112, num_experts=4, top_k=2)
LAYERS = {**SPECS, "slice": SLICE, "shared slice": SHARED_SLICE, "wide": WIDE, "large": LARGE, "thin": THIN}
FIRST_KERNELS = {"large": "gate_up_gemm"}
"""Of one token without adapters, where it is not the token MLP: most multiprocessors have one row tile of gate_up."""


def one_expert(ids: Tensor, _spec: LayerSpec) -> None:
    """Every token chose the last expert alone."""
    ids.fill_(-1)[:, 0] = _spec.num_experts - 1


def twice(ids: Tensor, _spec: LayerSpec) -> None:
    """Every token chose one expert as often as it may choose: more rows of it than a tile holds."""
    ids[:] = ids[:, :1].clamp(min=0)


def nobody(ids: Tensor, _spec: LayerSpec) -> None:
    """No token chose any."""
    ids.fill_(-1)


def as_drawn(_ids: Tensor, _spec: LayerSpec) -> None:
    """Distinct experts, a tenth of the choices dropped."""


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("choose", [as_drawn, one_expert, twice, nobody])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_as_sorted(gpu: Gpu, name: str, choose: Callable[[Tensor, LayerSpec], None], lora: bool) -> None:
    spec = LAYERS[name]
    layer: GpuLayer = gpu.layer(spec)
    if lora:
        layer.install(some_adapters(spec))
    reached = False
    for shape in SHAPES:
        for tokens in {shape, max(shape - 1, 1)}:
            batch = random_batch(spec, tokens, seed=shape, slots=[0, -1, 2, 1, 3] if lora else None, drop=0.1)
            assert batch.topk_ids is not None
            choose(batch.topk_ids, spec)
            direct = layer.runnable(shape, Plan.FUSED, lora=lora, captured=True)
            by_sort = layer.runnable(shape, Plan.FUSED, lora=lora, captured=True, apart=True)
            labels = [launch.label for launch in direct.program.launches]
            if shape == 1 and not lora:
                assert labels[labels.index("sort") + 1] == FIRST_KERNELS.get(name, "token_mlp")
            assert "gather" not in labels or not (layer.geometry.direct(shape, lora=lora) or "expert_mlp" in labels)
            layer.poison()
            wanted = layer.forward(by_sort, batch)
            layer.poison()
            assert same_bits(layer.forward(direct, batch), wanted), (shape, tokens)
            reached |= bool(wanted.abs().max() > 0)
    assert reached or choose is not as_drawn


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("value", [float("nan"), float("-nan"), float("inf"), float("-inf")], ids=str)
def test_no_value_is_taken_for_a_missing_one(gpu: Gpu, value: float, lora: bool) -> None:
    """The token MLP waits for activations and h that are a certain NaN; those that tokens make are none of it."""
    layer: GpuLayer = gpu.layer(SLICE)
    if lora:
        layer.install(some_adapters(SLICE))
    batch = random_batch(SLICE, 3, seed=5, slots=[0, 1, 2] if lora else None)
    batch.hidden_states[0] = value
    batch.hidden_states[1].view(torch.int16)[:] = -1
    direct = layer.runnable(3, Plan.FUSED, lora=lora, captured=True)
    assert "token_mlp" in [launch.label for launch in direct.program.launches]
    wanted = layer.forward(layer.runnable(3, Plan.FUSED, lora=lora, captured=True, apart=True), batch)
    for _ in range(3):
        assert same_bits(layer.forward(direct, batch), wanted)
