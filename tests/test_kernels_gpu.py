"""Routing, sort and gather on a real GPU: bit for bit where the result is exact, else within their rounding."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_engines import Gpu, GpuLayer, gpu, same_bits
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.gemm_config import LORA_TILE
from moelet.graphs.geometry import Geometry, token_tile
from moelet.graphs.pool import Runnable, Variant
from moelet.graphs.program import Plan
from moelet.layer.engine import LayerBatch
from moelet.layer.layout import from_block_major_k
from moelet.layer.routing import route
from moelet.layer.spec import LayerSpec, RoutingMethod, RoutingSpec
from permutation import assert_made, permutation
from random_layers import random_batch, random_weights

pytestmark = pytest.mark.gpu

SHARED = LayerSpec(
    index=0,
    hidden_size=200,
    intermediate_size=104,
    num_experts=12,
    top_k=4,
    shared_intermediate_size=150,
    shared_gated=True,
)
SPECS = {
    "shared": SHARED,
    "slice": replace(SHARED, num_local_experts=5, local_expert_offset=3),
    "wide": LayerSpec(index=0, hidden_size=2880, intermediate_size=40, num_experts=3, top_k=2),
}
POISONED = torch.tensor(-1, dtype=torch.int16)
"""A poisoned word of two bytes."""
FP32_ROUNDING = 2.0**-24


def patterned(spec: LayerSpec, tokens: int, pattern: str) -> LayerBatch:
    """A batch whose routing is ``random`` with drops, all on ``one`` expert, there as ``one group``, or ``nowhere``."""
    slots = [2] if pattern == "one group" else [0, -1, 2, 1, 3, 1]
    batch = random_batch(spec, tokens, seed=tokens, slots=slots, drop=0.2)
    assert batch.topk_ids is not None
    if pattern.startswith("one"):
        batch.topk_ids.fill_(-1)[:, 1] = spec.local_expert_offset + 1
    if pattern == "nowhere":
        batch.topk_ids.fill_(-1)
    return batch


def assert_sorted(layer: GpuLayer, runnable: Runnable, batch: LayerBatch, tile_rows: int) -> list[int]:
    """Places, tiles of ``tile_rows`` and adapter groups are those of plain loops; the places."""
    shape, lora, arena = runnable.variant.num_tokens, runnable.variant.lora, runnable.arena
    assert batch.topk_ids is not None
    assert batch.token_slots is not None
    slots, group_rows = batch.token_slots.tolist() if lora else None, layer.geometry.group_rows(shape)
    ids = batch.topk_ids.tolist()
    made = permutation(layer.geometry, ids, slots, tile_rows, group_rows, balanced=runnable.wide)
    place_tokens = arena.read("place_tokens").tolist()
    for row, place in enumerate(made.places):
        assert place < 0 or place_tokens[place] == row // layer.geometry.choices
    assert_made(arena, made, shape * layer.geometry.choices, lora=lora)
    if any("row_slots" in launch.writes for launch in runnable.program.launches):
        row_slots = arena.read("row_slots")
        assert {place: int(row_slots[place]) for place in made.row_slots} == made.row_slots
    return made.places


MANY = LayerSpec(index=0, hidden_size=64, intermediate_size=40, num_experts=256, top_k=7, shared_intermediate_size=40)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_many_rows_are_sorted_for_an_expert_mlp(gpu: Gpu, lora: bool) -> None:
    layer = gpu.layer(MANY, max_tokens=2048)
    for tokens, shape, tile_rows in ((390, 400, 64), (1025, 1025, 64), (2048, 2048, LORA_TILE)):
        batch, variant = patterned(MANY, tokens, "random"), Variant(shape, RoutingInput.TOPK, lora)
        runnable = layer.pool.build(variant, Plan.FUSED, captured=False)
        assert [launch.kernel.name for launch in runnable.program.launches][:2] == ["wide_sort", "expert_mlp"]
        layer.poison()
        layer.send(runnable, batch)
        layer.launch(runnable, "sort")
        assert_sorted(layer, runnable, batch, tile_rows if lora else 128)


SORTS = {"narrow_sort": (1, 2, 8, 64, 256), "wide_sort": (257, 300, 400), "sort": (1, 2, 8, 64, 256, 300)}
"""Shapes that each sort is tried with."""


@pytest.mark.parametrize("kernel", SORTS)
@pytest.mark.parametrize("pattern", ["random", "one", "one group", "nowhere"])
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_sorted_stably_and_no_other_is_touched(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str, lora: bool, pattern: str, kernel: str
) -> None:
    if kernel == "sort":
        monkeypatch.setattr(Geometry, "sorts_narrow", lambda *_, **__: False)
        monkeypatch.setattr(Geometry, "sorts_wide", lambda *_, **__: False)
    layer, plan = gpu.layer(SPECS[name], max_tokens=400), Plan.SINGLE_STREAM if lora else Plan.FUSED
    for shape, tokens in ((full, each) for full in SORTS[kernel] for each in {full, full - full // 7}):
        batch, variant = patterned(layer.spec, tokens, pattern), Variant(shape, RoutingInput.TOPK, lora)
        runnable = layer.pool.build(variant, plan, captured=False, apart=True)
        assert [launch.kernel.name for launch in runnable.program.launches if launch.label == "sort"] == [kernel]
        layer.poison()
        layer.send(runnable, batch)
        layer.launch(runnable, "sort")
        wide_tile = layer.geometry.wide_tile(shape, lora=lora) if runnable.wide else None
        places = assert_sorted(layer, runnable, batch, wide_tile or token_tile(layer.geometry, shape, lora=lora))
        assert (runnable.arena.read("tokens").view(torch.int16) == POISONED).all()
        layer.launch(runnable, "gather")
        assert_gathered(layer, runnable, batch, places)


def assert_gathered(layer: GpuLayer, runnable: Runnable, batch: LayerBatch, places: list[int]) -> None:
    """Hidden states lie at their places, zeros behind them up to a whole block, poison everywhere else."""
    geometry = layer.geometry
    stored = runnable.arena.read("tokens")
    rows = from_block_major_k(stored[None], stored.shape[1], geometry.hidden_stride, swizzled=True)[0]
    expected = POISONED.expand(rows.shape).clone().view(torch.bfloat16)
    hidden = torch.zeros(batch.num_tokens, geometry.hidden_stride).bfloat16()
    hidden[:, : layer.spec.hidden_size] = batch.hidden_states
    for row, place in enumerate(places):
        if place >= 0:
            expected[place] = hidden[row // geometry.choices]
    assert same_bits(rows, expected)


GATED = LayerSpec(
    index=0,
    hidden_size=2880,
    intermediate_size=16,
    num_experts=128,
    top_k=8,
    shared_intermediate_size=24,
    shared_gated=True,
)


@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32], ids=str)
def test_gate_logits_are_fp32_sums(gpu: Gpu, router: torch.dtype) -> None:
    weights = random_weights(GATED)
    if router == torch.float32:
        weights = replace(weights, router=torch.randn(128, 2880, generator=torch.Generator().manual_seed(4)) / 50)
    layer = GpuLayer(gpu, GATED, weights, 200, 1, 8)
    batch, runnable = random_batch(GATED, 197), layer.runnable(200, routing=RoutingInput.GATE, lora=False)
    layer.poison()
    layer.send(runnable, batch)
    layer.launch(runnable, "gate")
    logits, shared = runnable.arena.read("logits"), runnable.arena.read("shared_weights")
    hidden = batch.hidden_states.double()
    # A lane's chain of fused multiply-adds and five steps of a butterfly, each rounded once.
    roundings = (layer.geometry.hidden_stride / 32 + 5) * FP32_ROUNDING

    truth = hidden @ weights.router.double().T
    bound = hidden.abs() @ weights.router.double().abs().T * roundings
    assert ((logits[:197] - truth).abs() <= bound).all()
    assert bound.max() < (truth.bfloat16() - truth).abs().max() / 8, "a logit rounded to bf16 would be seen"
    assert logits[197:].isnan().all()

    assert weights.shared_gate is not None
    gate = weights.shared_gate.double()
    truth = (hidden @ gate.T).sigmoid().flatten()
    bound = (hidden.abs() @ gate.abs().T * roundings).flatten() / 4 + 4 * FP32_ROUNDING
    assert ((shared[:197] - truth).abs() <= bound).all()
    assert shared[197:].isnan().all()
    layer.close()


def sigmoid_routing(groups: int, kept: int, bias: bool) -> RoutingSpec:
    return RoutingSpec(
        method=RoutingMethod.SIGMOID_GROUPED,
        renormalize=True,
        num_groups=groups,
        topk_groups=kept,
        has_correction_bias=bias,
        routed_scaling_factor=2.5,
    )


ROUTINGS = {
    "softmax": RoutingSpec(),
    "renormalized": RoutingSpec(renormalize=True, routed_scaling_factor=1.5),
    "topk_softmax": RoutingSpec(method=RoutingMethod.TOPK_SOFTMAX),
    "sigmoid": sigmoid_routing(1, 1, True),
    "grouped": sigmoid_routing(4, 2, True),
    "grouped, no bias": sigmoid_routing(4, 3, False),
}
SIZES = [(1, 1), (8, 2), (60, 4), (128, 8), (256, 8), (256, 10), (512, 10)]
ROUTED = [
    pytest.param(name, experts, top_k, id=f"{name}-{experts}-{top_k}")
    for name in ROUTINGS
    for experts, top_k in SIZES
    if "grouped" not in name or (experts >= 8 and experts % 4 == 0)
]
TOKENS = 300


def routed(gpu: Gpu, spec: LayerSpec, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids and weights that the route kernel gives, and the bias it added."""
    layer = gpu.layer(spec, max_tokens=TOKENS, max_loras=1, rank=8)
    batch = random_batch(spec, len(logits))
    batch = replace(batch, topk_ids=None, topk_weights=None, router_logits=logits)
    runnable = layer.runnable(TOKENS, routing=RoutingInput.LOGITS, lora=False)
    layer.poison()
    layer.send(runnable, batch)
    layer.launch(runnable, "route")
    arena, tokens = runnable.arena, len(logits)
    assert (arena.read("routed_ids")[tokens:] == -1).all(), "padding tokens are left alone"
    return arena.read("routed_ids")[:tokens], arena.read("routed_weights")[:tokens], layer.weights.correction_bias


def routing_layer(name: str, experts: int, top_k: int) -> LayerSpec:
    return LayerSpec(
        index=0, hidden_size=40, intermediate_size=24, num_experts=experts, top_k=top_k, routing=ROUTINGS[name]
    )


@pytest.mark.parametrize(("name", "experts", "top_k"), ROUTED)
def test_route_chooses_as_the_routing_module(gpu: Gpu, name: str, experts: int, top_k: int) -> None:
    spec = routing_layer(name, experts, top_k)
    logits = 2 * torch.randn(TOKENS - 3, experts, generator=torch.Generator().manual_seed(experts + top_k))
    ids, weights, bias = routed(gpu, spec, logits)
    wanted, _ = route(logits, spec, bias)
    if spec.routing.method is not RoutingMethod.SIGMOID_GROUPED:
        assert torch.equal(ids, wanted)
    # A sigmoid may round to its neighbour, and two experts as good as equal change places; no more than one token has.
    same = (ids == wanted).all(dim=1)
    assert same.sum() >= len(logits) - 1
    exact_ids, exact = route(logits.double(), spec, bias)
    clear = same & (exact_ids == wanted).all(dim=1)
    assert clear.sum() >= len(logits) - 2
    error = (weights.double() - exact).abs()[clear] / exact[clear].clamp_min(1e-30)
    assert error.max() <= 32 * FP32_ROUNDING


@pytest.mark.parametrize(("name", "experts", "top_k"), ROUTED)
def test_route_gives_ties_to_the_lower_expert(gpu: Gpu, name: str, experts: int, top_k: int) -> None:
    spec = routing_layer(name, experts, top_k)
    if spec.routing.has_correction_bias:
        spec = replace(spec, routing=replace(spec.routing, has_correction_bias=False))
    logits = torch.randint(0, 4, (TOKENS, experts), generator=torch.Generator().manual_seed(top_k)).float()
    ids, _, _ = routed(gpu, spec, logits)
    assert torch.equal(ids, route(logits, spec)[0])


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_that_is_not_a_number_poisons_itself_alone(gpu: Gpu, name: str) -> None:
    spec = routing_layer(name, 60, 4)
    logits = torch.randn(9, 60, generator=torch.Generator().manual_seed(1))
    ids, weights, bias = routed(gpu, spec, logits)
    broken = logits.clone()
    broken[2, 7], broken[5] = torch.nan, torch.nan
    broken[7, 3:] = -torch.inf
    softmax = spec.routing.method is not RoutingMethod.SIGMOID_GROUPED
    broken[8, 11] = torch.inf if softmax else 0.0
    broken_ids, broken_weights, _ = routed(gpu, spec, broken)
    assert broken_weights[[2, 5]].isnan().all()
    assert broken_weights[8].isnan().all() == softmax
    assert ((broken_ids >= 0) & (broken_ids < 60)).all()
    wanted_ids, wanted = route(broken, spec, bias)
    assert torch.equal(broken_ids[7], wanted_ids[7])
    assert torch.allclose(broken_weights[7], wanted[7], rtol=32 * FP32_ROUNDING, atol=0.0)
    others = [0, 1, 3, 4, 6]
    assert torch.equal(broken_ids[others], ids[others])
    assert torch.equal(broken_weights[others], weights[others])
