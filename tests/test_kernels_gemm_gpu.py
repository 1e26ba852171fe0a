"""GEMMs, activation and finalize on a real GPU, each alone: float64 by the tolerance rule, the finalize bit for bit."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_engines import GPU, Gpu, exact_sums, gpu, same_bits, summed_by_hand
from moelet.graphs.geometry import token_tile
from moelet.graphs.program import Plan
from moelet.layer.layout import block_major_k
from moelet.layer.spec import LayerSpec
from oracle import assert_close_to_truth, frobenius_error
from placed_rows import assert_rest_is_poison, blocks_to_rows, placed
from random_layers import normal, random_batch

pytestmark = pytest.mark.gpu

SPEC = LayerSpec(index=0, hidden_size=2880, intermediate_size=1408, num_experts=3, top_k=2)
SMALL = LayerSpec(index=0, hidden_size=200, intermediate_size=104, num_experts=5, top_k=3)
TILES = [(8, 8, 8), (13, 16, 16), (29, 32, 32), (61, 64, 64), (128, 128, 128), (300, 300, 128)]
"""(tokens, shape, token tile)."""
SHAPES = [pytest.param(*sizes, id=f"{sizes[0]} tokens, tile {sizes[2]}") for sizes in TILES]


def per_expert(x: Tensor, weights: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
    """``x[i] @ weights[experts[i]].T`` in ``dtype``, worked out on the GPU."""
    out = torch.empty(len(x), weights.shape[1], dtype=dtype)
    with exact_sums():
        for expert in experts.unique():
            mine = experts == expert
            out[mine] = F.linear(x[mine].to(GPU, dtype), weights[expert].to(GPU, dtype)).cpu()
    return out


@pytest.mark.parametrize("one", [False, True], ids=["spread", "one expert"])
@pytest.mark.parametrize(("tokens", "shape", "tile"), SHAPES)
def test_gate_up_keeps_fp32(gpu: Gpu, tokens: int, shape: int, tile: int, one: bool) -> None:
    layer = gpu.layer(SPEC, max_tokens=300)
    assert token_tile(layer.geometry, shape, lora=False) == tile
    case = placed(layer, tokens, shape, lora=True, one=one)
    batch, runnable, rows = case.batch, case.runnable, case.rows
    layer.launch(runnable, "gate_up_gemm")
    stored = runnable.arena.read("gate_up")
    value = stored[rows.places].transpose(1, 2).flatten(1)
    x = batch.hidden_states[rows.tokens]
    truth = per_expert(x, layer.weights.gate_up, rows.experts, torch.float64)
    baseline = per_expert(x, layer.weights.gate_up, rows.experts, torch.bfloat16)
    assert frobenius_error(value, truth) <= frobenius_error(baseline, truth) / 16
    assert_close_to_truth(value.bfloat16(), truth, baseline)
    assert_rest_is_poison(stored, rows.places)


@pytest.mark.parametrize("one", [False, True], ids=["spread", "one expert"])
@pytest.mark.parametrize(("tokens", "shape", "tile"), SHAPES)
def test_gate_up_with_its_activation(gpu: Gpu, tokens: int, shape: int, tile: int, one: bool) -> None:
    layer = gpu.layer(SPEC, max_tokens=300)
    assert token_tile(layer.geometry, shape, lora=False) == tile
    case = placed(layer, tokens, shape, lora=False, one=one)
    rows = case.rows
    layer.launch(case.runnable, "gate_up_gemm")
    stored = blocks_to_rows(case.runnable.arena.read("act"), SPEC.intermediate_size)
    x = case.batch.hidden_states[rows.tokens]
    exact, rounded = (
        per_expert(x, layer.weights.gate_up, rows.experts, dtype).chunk(2, dim=1)
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close_to_truth(stored[rows.places], F.silu(exact[0]) * exact[1], F.silu(rounded[0]) * rounded[1])
    assert_rest_is_poison(stored, rows.places)


@pytest.mark.parametrize("one", [False, True], ids=["spread", "one expert"])
@pytest.mark.parametrize(("tokens", "shape", "tile"), SHAPES)
@pytest.mark.parametrize("apart", [False, True], ids=["bf16", "fp32"])
def test_down(gpu: Gpu, tokens: int, shape: int, tile: int, one: bool, apart: bool) -> None:
    layer = gpu.layer(SPEC, max_tokens=300)
    assert token_tile(layer.geometry, shape, lora=False) == tile
    case = placed(layer, tokens, shape, lora=apart, one=one)
    rows, arena = case.rows, case.runnable.arena
    act = normal(torch.Generator().manual_seed(tokens), layer.geometry.rows(shape), SPEC.intermediate_size)
    arena.write("act", block_major_k(act[None], row_tile=8, swizzled=True)[0])
    layer.launch(case.runnable, "down_gemm")
    stored = arena.read("down_sums") if apart else arena.read("down")
    truth = per_expert(act[rows.places], layer.weights.down, rows.experts, torch.float64)
    baseline = per_expert(act[rows.places], layer.weights.down, rows.experts, torch.bfloat16)
    value = stored[rows.places, : SPEC.hidden_size]
    if apart:
        assert frobenius_error(value, truth) <= frobenius_error(baseline, truth) / 64
    assert_close_to_truth(value.bfloat16(), truth, baseline)
    assert_rest_is_poison(stored, rows.places)


def test_padding_features_are_zero(gpu: Gpu) -> None:
    layer = gpu.layer(SMALL)
    case = placed(layer, 50, 64, lora=False)
    layer.launch(case.runnable, "gate_up_gemm", "down_gemm")
    act = blocks_to_rows(case.runnable.arena.read("act"), layer.geometry.intermediate_stride)[case.rows.places]
    assert (act[:, SMALL.intermediate_size :] == 0).all()
    assert (act[:, : SMALL.intermediate_size] != 0).any(dim=0).all()
    down = case.runnable.arena.read("down")[case.rows.places]
    assert (down[:, SMALL.hidden_size :] == 0).all()
    assert (down[:, : SMALL.hidden_size] != 0).any(dim=0).all()


def test_activation_adds_the_delta_of_rows_that_have_one(gpu: Gpu) -> None:
    layer = gpu.layer(SPEC, max_tokens=300)
    case = placed(layer, 290, 300, lora=True)
    rows, arena, g = case.rows, case.runnable.arena, torch.Generator().manual_seed(5)
    shape = (layer.geometry.rows(300), SPEC.intermediate_size, 2)
    gate_up, delta = torch.full(shape, torch.nan), torch.full(shape, torch.nan).bfloat16()
    gate_up[rows.places] = 2 * torch.randn(len(rows.places), *shape[1:], generator=g)
    adapted = torch.tensor([place for place, slot in case.made.row_slots.items() if slot >= 0])
    delta[adapted] = normal(g, len(adapted), *shape[1:])
    arena.write("gate_up", gate_up)
    arena.write("gate_up_delta", delta)
    layer.launch(case.runnable, "activation")
    stored = blocks_to_rows(arena.read("act"), SPEC.intermediate_size)
    change = torch.zeros(shape).bfloat16()
    change[adapted] = delta[adapted]
    gate, up = (gate_up.double() + change.double())[rows.places].unbind(2)
    rounded_gate, rounded_up = (gate_up.bfloat16() + change)[rows.places].unbind(2)
    assert_close_to_truth(stored[rows.places], F.silu(gate) * up, F.silu(rounded_gate) * rounded_up)
    assert_rest_is_poison(stored, rows.places)


CHOICES = [(1, 0, False), (4, 150, True), (4, 150, False), (8, 104, True), (10, 0, False)]
"""(top-k, width of the shared experts, whether they have a gate)."""


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "delta apart"])
@pytest.mark.parametrize(("top_k", "shared", "gated"), CHOICES)
def test_finalize_sums_in_order(gpu: Gpu, top_k: int, shared: int, gated: bool, apart: bool) -> None:
    spec = replace(SMALL, num_experts=12, top_k=top_k, shared_intermediate_size=shared, shared_gated=gated)
    check_finalize(gpu, spec, 50, 64, apart=apart)


@pytest.mark.parametrize("hidden", [200, 1024, 2880])
@pytest.mark.parametrize(("top_k", "shared", "gated"), [*CHOICES, (31, 104, False), (32, 0, False), (65, 150, True)])
def test_finalize_of_many_tokens_sums_in_order(gpu: Gpu, top_k: int, shared: int, gated: bool, hidden: int) -> None:
    """Of several parts of columns, and of more choices than are summed at once."""
    spec = replace(SMALL, num_experts=70, top_k=top_k, shared_intermediate_size=shared, shared_gated=gated)
    check_finalize(gpu, replace(spec, hidden_size=hidden), 290, 300, apart=False)


def check_finalize(gpu: Gpu, spec: LayerSpec, tokens: int, shape: int, *, apart: bool) -> None:
    layer = gpu.layer(replace(spec, num_local_experts=-1), max_tokens=shape)
    geometry, g = layer.geometry, torch.Generator().manual_seed(spec.top_k)
    runnable = layer.runnable(shape, Plan.SINGLE_STREAM if apart else Plan.FUSED, apart=True)
    batch = random_batch(layer.spec, tokens, slots=[0, -1, 1])
    layer.poison()
    layer.send(runnable, batch)
    gpu.streams.synchronize()
    arena, rows, stride = runnable.arena, geometry.rows(shape), geometry.output_stride
    places = torch.randperm(rows, generator=g)[: tokens * geometry.choices].view(tokens, -1).to(torch.int32)
    places[torch.rand(places.shape, generator=g) < 0.2] = -1
    places[[0, 7]] = -1
    places[9:12, :32] = -1
    arena.write("places", torch.cat([places.flatten(), torch.full(((shape - tokens) * geometry.choices,), -1).int()]))
    used = places[places >= 0].long()
    sums, delta = torch.full((rows, stride), torch.nan), torch.full((rows, stride), torch.nan).bfloat16()
    sums[used] = torch.randn(len(used), stride, generator=g)
    assert batch.token_slots is not None
    adapted = places[batch.token_slots >= 0]
    adapted = adapted[adapted >= 0].long()
    delta[adapted] = normal(g, len(adapted), stride)
    shared_weights = torch.rand(shape, generator=g)
    arena.write("shared_weights", shared_weights)
    down = sums.clone()
    if apart:
        arena.write("down_sums", sums)
        arena.write("down_delta", delta)
        down[adapted] += delta[adapted].float()
    else:
        arena.write("down", down.bfloat16())
    layer.launch(runnable, "finalize")
    per_token = shared_weights[:tokens, None] if spec.shared_gated else torch.ones(tokens, 1)
    assert batch.topk_weights is not None
    weights = torch.cat([batch.topk_weights, per_token.expand(-1, geometry.num_shared)], dim=1)
    out = arena.read("output")
    assert same_bits(out[:tokens], summed_by_hand(down.bfloat16(), weights, places))
    assert out[tokens:].isnan().all(), "padding tokens are left alone"
