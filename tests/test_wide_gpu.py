"""The kernels of many tokens on a real GPU: float64 by the tolerance rule, the sort and the gather bit for bit."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from declarations import false_declarations
from gpu_engines import GPU, Gpu, GpuLayer, exact_sums, expected, gpu, opened_engine, same_bits, summed_by_hand
from lora_cases import of_every_kind
from lora_groups import HALVES, assert_shrunk, groups
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.gemm_config import WIDE_TILES
from moelet.graphs.hazards import find_hazards
from moelet.graphs.program import Plan
from moelet.graphs.sort_sizes import SORT_WARPS, SortSizes
from moelet.layer.adapter import Adapter
from moelet.layer.layout import block_major_k
from moelet.layer.spec import LayerSpec, RoutingSpec
from oracle import assert_close_to_truth
from permutation import assert_made
from placed_rows import Placed, assert_rest_is_poison, blocks_to_rows, placed
from random_layers import normal, random_batch, random_weights

pytestmark = pytest.mark.gpu

SHAPE, MANY = 300, 2100


def spec_of(hidden: int, width: int, experts: int, top_k: int, shared: int = 0) -> LayerSpec:
    return LayerSpec(
        index=0,
        hidden_size=hidden,
        intermediate_size=width,
        num_experts=experts,
        top_k=top_k,
        routing=RoutingSpec(renormalize=True),
        shared_intermediate_size=shared,
        shared_gated=shared > 0,
    )


SPECS = {
    "tile 128, odd row tiles": spec_of(2880, 1400, 6, 2),
    "tile 160": spec_of(328, 200, 5, 2, 300),
    "tile 256": spec_of(520, 136, 3, 2),
    "tile 256, one K-block": spec_of(64, 64, 2, 2),
    "tile 256, two K-blocks": spec_of(128, 128, 2, 2),
}
FEW_EACH = spec_of(136, 72, 8, 2)
TILES = {name: int(name[5:8]) for name in SPECS}
CASES = [(name, tokens, one) for name in SPECS for tokens, one in ((SHAPE, False), (SHAPE, True), (257, False))]


@cache
def adapters_of(spec: LayerSpec) -> tuple[Adapter | None, ...]:
    """Adapters of every kind but the last; the same objects at every call, so that they are installed once."""
    return tuple(of_every_kind(spec)[:-1])


def layer_of(gpu: Gpu, name: str) -> GpuLayer:
    spec = SPECS[name]
    layer = gpu.layer(spec, max_tokens=SHAPE, max_loras=len(adapters_of(spec)), seed=3, rank=104)
    assert layer.geometry.wide_tile(SHAPE, lora=True) == TILES[name]
    return layer


def placed_in(layer: GpuLayer, tokens: int, *, lora: bool, one: bool = False) -> Placed:
    """Sorted and gathered by the kernels of many tokens."""
    if lora:
        layer.install(adapters_of(layer.spec))
    case = placed(layer, tokens, SHAPE, lora=lora, one=one, plan=Plan.FUSED)
    assert case.runnable.wide
    return case


def test_every_tile_is_tried() -> None:
    assert set(TILES.values()) == set(WIDE_TILES)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize(("name", "tokens", "one"), CASES)
def test_rows_are_sorted_stably_and_gathered(gpu: Gpu, name: str, tokens: int, one: bool, lora: bool) -> None:
    assert_sorted(placed_in(layer_of(gpu, name), tokens, lora=lora, one=one), lora=lora)


@pytest.mark.parametrize(("tokens", "one"), [(SHAPE, False), (SHAPE, True), (257, False)])
def test_rows_are_sorted_alike_where_experts_have_too_few_for_wide_gemms(gpu: Gpu, tokens: int, one: bool) -> None:
    layer = gpu.layer(FEW_EACH, max_tokens=SHAPE, max_loras=len(adapters_of(FEW_EACH)), seed=3, rank=104)
    layer.install(adapters_of(FEW_EACH))
    case = placed(layer, tokens, SHAPE, lora=True, one=one, plan=Plan.FUSED)
    assert not case.runnable.wide
    assert [launch.label for launch in case.runnable.program.launches][:2] == ["sort", "gather"]
    assert_sorted(case, lora=True)


@pytest.mark.parametrize("tables", [SORT_WARPS, 1])
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize(("tokens", "one"), [(MANY, False), (MANY, True), (2049, False)])
def test_a_sort_of_several_chunks_a_warp_needs_no_more_than_one_table(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tokens: int, one: bool, lora: bool, tables: int
) -> None:
    monkeypatch.setattr(SortSizes, "wide_tables", tables)
    spec = SPECS["tile 256, one K-block"]
    layer = gpu.layer(spec, max_tokens=MANY, max_loras=len(adapters_of(spec)), seed=tables, rank=104)
    layer.install(adapters_of(spec))
    case = placed(layer, tokens, MANY, lora=lora, one=one, plan=Plan.FUSED)
    assert [launch.kernel.name for launch in case.runnable.program.launches][:1] == ["wide_sort"]
    assert_sorted(case, lora=lora, shape=MANY)


def assert_sorted(case: Placed, *, lora: bool, shape: int = SHAPE) -> None:
    """Places, tiles and groups are those of plain loops, rows lie at their places, and nothing else was written."""
    layer, arena, made = case.layer, case.runnable.arena, case.made
    assert_made(arena, made, shape * layer.geometry.choices, lora=lora)
    assert arena.read("place_tokens")[case.rows.places].tolist() == case.rows.tokens.tolist()
    rows = blocks_to_rows(arena.read("tokens"), layer.geometry.hidden_stride)
    hidden = rows[case.rows.places]
    assert same_bits(hidden[:, : layer.spec.hidden_size], case.batch.hidden_states[case.rows.tokens])
    assert (hidden[:, layer.spec.hidden_size :] == 0).all()
    assert_rest_is_poison(rows, case.rows.places)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("name", "tokens", "one"), CASES)
def test_shrink(gpu: Gpu, name: str, tokens: int, one: bool, half: str) -> None:
    layer = layer_of(gpu, name)
    if layer.geometry.num_shared:
        pytest.skip("adapters of shared experts are told by the layer as a whole")
    case = placed_in(layer, tokens, lora=True, one=one)
    arena, width = case.runnable.arena, layer.spec.intermediate_size
    act = normal(torch.Generator().manual_seed(1), layer.geometry.rows(SHAPE), width)
    if half == "down":
        arena.write("act", block_major_k(act[None], row_tile=8, swizzled=True)[0])
        layer.launch(case.runnable, "lora_shrink of down")
    sides = len(HALVES[half])
    stored = arena.read(f"{half}_h").flatten().view(-1, sides, layer.geometry.rows(SHAPE), 8)
    stored = stored.permute(2, 1, 0, 3).flatten(2)
    assert_shrunk(case, half, stored, act)


def product(case: Placed, x: Tensor, weights: Tensor, projection: str, dtype: torch.dtype, *, lora: bool) -> Tensor:
    """``x W^T`` and with ``lora`` its delta for every row in use, worked out on the GPU; ``x`` by permuted row."""
    places, rows = case.rows.places, torch.full((len(x), weights.shape[1]), torch.nan, dtype=dtype, device=GPU)
    with exact_sums():
        for expert in case.rows.experts.unique():
            mine = places[case.rows.experts == expert]
            rows[mine] = F.linear(x[mine].to(GPU, dtype), weights[expert].to(GPU, dtype))
        for group in groups(case, projection) if lora else ():
            if group.rank:
                a, b = group.a.to(GPU, dtype), group.b.to(GPU, dtype)
                rows[group.rows] += F.linear(F.linear(x[group.rows].to(GPU, dtype), a) * group.scaling, b)
    return rows[places].cpu()


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize(("name", "tokens", "one"), CASES)
def test_gemms(gpu: Gpu, name: str, tokens: int, one: bool, lora: bool) -> None:
    layer = layer_of(gpu, name)
    if layer.geometry.num_shared:
        pytest.skip("shared experts are told by the layer as a whole")
    case = placed_in(layer, tokens, lora=lora, one=one)
    arena, rows, spec = case.runnable.arena, case.rows, layer.spec
    layer.launch(case.runnable, "gate_up_gemm")
    act = blocks_to_rows(arena.read("act"), layer.geometry.intermediate_stride)
    assert_rest_is_poison(act, rows.places)
    assert (act[rows.places, spec.intermediate_size :] == 0).all()
    act = act[:, : spec.intermediate_size]
    x = torch.zeros(len(act), spec.hidden_size).bfloat16()
    x[rows.places] = case.batch.hidden_states[rows.tokens]
    sides = layer.weights.gate_up.chunk(2, dim=1)
    exact, rounded = (
        [product(case, x, side, kind, dtype, lora=lora) for side, kind in zip(sides, ("gate", "up"), strict=True)]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close_to_truth(act[rows.places], F.silu(exact[0]) * exact[1], F.silu(rounded[0]) * rounded[1])

    layer.launch(case.runnable, *["lora_shrink of down"] * lora, "down_gemm")
    down = case.runnable.arena.read("down")
    assert_rest_is_poison(down, rows.places)
    assert (down[rows.places, spec.hidden_size :] == 0).all()
    truth, baseline = (
        product(case, act, layer.weights.down, "down", dtype, lora=lora) for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close_to_truth(down[rows.places, : spec.hidden_size], truth, baseline)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_of_many_tokens(gpu: Gpu, name: str, lora: bool) -> None:
    """Close to the truth, the same bits at every run, eager and captured; without adapters those of few tokens."""
    layer, adapters = layer_of(gpu, name), adapters_of(SPECS[name])
    if lora:
        layer.install(adapters)
    slots = [-1, *range(len(adapters))] if lora else None
    for routing in (RoutingInput.TOPK, RoutingInput.GATE):
        batch = random_batch(layer.spec, 290, seed=9, slots=slots, drop=0.1 * (routing is RoutingInput.TOPK))
        if routing is RoutingInput.GATE:
            batch = replace(batch, topk_ids=None, topk_weights=None)
        wanted = layer.eager(batch, SHAPE)
        if routing is RoutingInput.TOPK:
            known = expected(layer.spec, layer.weights, batch, adapters if lora else ())
            assert_close_to_truth(wanted, known.truth, known.baseline)
        runnable = layer.runnable(SHAPE, routing=routing, lora=lora, captured=True)
        assert runnable.wide
        assert runnable.graph is not None
        assert find_hazards(runnable.graph.topology()) == []
        for _ in range(5):
            layer.poison()
            assert same_bits(layer.forward(runnable, batch), wanted)
        if not lora:
            parts = [layer.eager(batch.part(start, min(start + 64, 290)), 64) for start in range(0, 290, 64)]
            assert same_bits(torch.cat(parts), wanted)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_launches_touch_what_they_declare_and_nothing_else(gpu: Gpu, lora: bool) -> None:
    layer = layer_of(gpu, "tile 256")
    layer.install(adapters_of(layer.spec))
    runnable = layer.runnable(SHAPE, lora=lora)
    layer.forward(runnable, random_batch(layer.spec, 280, slots=[0, -1, 1] if lora else None))
    assert false_declarations(runnable.program.launches, runnable.arena) == []


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_what_is_left_unfinalized_is_the_same_by_hand(gpu: Gpu, lora: bool) -> None:
    layer = layer_of(gpu, "tile 160")
    options = {"max_loras": 7, "max_lora_rank": 104, "max_decode_tokens": 16, "decode_shapes": (4,)}
    with opened_engine(layer.spec, layer.weights, max_eager_tokens=SHAPE, **options) as engine:
        for slot, adapter in enumerate(adapters_of(layer.spec)):
            if adapter is not None:
                engine.install_adapter(slot, adapter)
        batch = random_batch(layer.spec, 290, slots=[-1, *range(7)] if lora else None, drop=0.1)
        out = engine.forward(batch)
        down, weights, places = engine.forward_unfinalized(batch)
        assert same_bits(summed_by_hand(down, weights, places), out)


@pytest.mark.parametrize("plan", [None, Plan.TWO_STREAM])
def test_decode_shapes_with_adapters_keep_the_bits_of_small_batches(gpu: Gpu, plan: Plan | None) -> None:  # noqa: ARG001
    """They have no wide GEMMs, however many tokens an expert has. What runs eagerly has, and is as near the truth."""
    spec, adapters = SPECS["tile 160"], adapters_of(SPECS["tile 160"])
    shapes: dict[str, Any] = {"decode_shapes": (16, SHAPE), "max_decode_tokens": SHAPE, "max_eager_tokens": 2 * SHAPE}
    with opened_engine(spec, random_weights(spec), max_loras=2, max_lora_rank=104, plan=plan, **shapes) as engine:
        for slot in range(2):
            adapter = adapters[slot]
            assert adapter is not None
            engine.install_adapter(slot, adapter)
        batch = random_batch(spec, 2 * SHAPE, seed=2, slots=[0, -1, 1])
        parts = [engine.forward(batch.part(start, start + 16)) for start in range(0, SHAPE - 12, 16)]
        assert same_bits(engine.forward(batch.part(0, SHAPE))[: SHAPE - 12], torch.cat(parts))
        known = expected(spec, random_weights(spec), batch, adapters[:2])
        assert_close_to_truth(engine.forward(batch), known.truth, known.baseline)
