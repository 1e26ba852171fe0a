"""What many tokens are run by, without a GPU: tiles, shared memory, launches in order, and what they touch."""

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fake_layer import FakeLayer, parameters
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.compiler import SOURCES
from moelet.graphs.gemm_config import WIDE_PIECE, WIDE_TILES, wide_config
from moelet.graphs.geometry import GROUP_ROWS, MLP_ROWS, MLP_TOKENS, ROW_ALIGN, WIDE_ABOVE, Geometry
from moelet.graphs.hazards import EdgeKind, find_hazards
from moelet.graphs.kernels import EPILOGUE_ACTIVATION, EPILOGUE_DOWN, wide_gemm
from moelet.graphs.options import GraphOptions
from moelet.graphs.planning import plan_memory
from moelet.graphs.pool import Variant, eager_shapes
from moelet.graphs.program import Plan
from moelet.graphs.sort_launches import inverse_of
from moelet.graphs.sort_sizes import NARROW_ROWS, NARROW_SHARE, SORT_WARPS, WIDE_SORT_BLOCKS, SortSizes
from moelet.graphs.wide_launches import WIDE_GATHER_BYTES, WIDE_PARTS, WIDE_SHRINK_BYTES, WIDE_SHRINK_THREADS
from moelet.layer.spec import LayerSpec
from ordering import labelled, ordering_edges
from pointers import pointed_at
from random_layers import SHARED_SPEC, SPEC, model_of
from static_asserts import check, constants_of, defines_of

pytest.importorskip("cuda.bindings.driver")

MANY = 300
HOPPER_SHARED_BYTES = 227 << 10
LABELS = {
    False: ["sort", "gather", "gate_up_gemm", "down_gemm", "finalize"],
    True: [
        "sort",
        "gather and lora_shrink of gate_up",
        "gate_up_gemm",
        "lora_shrink of down",
        "down_gemm",
        "finalize",
    ],
}
FEW_EACH = replace(SPEC, num_experts=12, num_local_experts=-1)
"""Of this, experts have too many of so many tokens for an expert MLP, and with adapters too few for wide GEMMs."""
FEW_EACH_LABELS = {
    False: LABELS[False],
    True: [
        "sort",
        "gather",
        "lora_shrink of gate_up",
        "gate_up_gemm",
        "lora_shrink of down",
        "down_gemm",
        "finalize",
    ],
}
VARIANTS = [Variant(MANY, routing, lora) for routing, lora in product(RoutingInput, (False, True))]
QWEN3_30B = LayerSpec(index=0, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)


@pytest.fixture(params=[SPEC, SHARED_SPEC, FEW_EACH], ids=["plain", "gated shared", "few of each expert"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeLayer:
    return FakeLayer(monkeypatch, request.param, (8, MANY))


@pytest.mark.parametrize(
    ("tokens", "base", "lora"),
    [
        (256, None, None),
        (1024, None, None),
        (1152, None, None),
        (1153, None, 128),
        (1792, None, 128),
        (1793, 128, 128),
        (1856, 160, 160),
        (2304, 160, 160),
        (2368, 256, 256),
        (8192, 256, 256),
    ],
)
def test_a_tile_holds_most_experts_tokens(tokens: int, base: int | None, lora: int | None) -> None:
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=1, max_lora_rank=8)
    assert geometry.wide_tile(tokens, lora=False) == base
    assert geometry.wide_tile(tokens, lora=True) == lora


@pytest.mark.parametrize(("tokens", "lora"), [(1024, None), (1025, None), (1535, None), (1536, 128)])
def test_few_experts_with_adapters_need_more_tokens_for_wide_gemms(tokens: int, lora: int | None) -> None:
    part = replace(QWEN3_30B, num_local_experts=32)
    geometry = Geometry.of(part, router_fp32=False, max_loras=1, max_lora_rank=8)
    assert geometry.wide_tile(tokens, lora=True) == lora
    assert geometry.wide_tile(tokens, lora=False) == 128


def test_shapes_above_the_decode_limit_grow_by_half_and_then_double() -> None:
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=8, max_lora_rank=8)
    assert eager_shapes(geometry, 256, 8192) == [512, 768, 1024, 1536, 2048, 4096, 8192]
    assert eager_shapes(geometry, 512, 3000) == [768, 1024, 1536, 2048, 3000]
    assert eager_shapes(geometry, WIDE_ABOVE, 300) == [300]
    assert eager_shapes(geometry, 8, 40) == [40]


@pytest.mark.parametrize(
    ("slots", "wide", "most"),
    [(31, True, 8192), (153, True, 8192), (154, False, 8192), (194, False, 4096), (385, False, 2048)],
)
def test_more_slots_than_a_wide_sort_holds_are_sorted_in_parts(slots: int, wide: bool, most: int) -> None:
    """What fits in parts of 2048 tokens by the sort of any is not refused."""
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=slots, max_lora_rank=8)
    assert geometry.sort_sizes(2048, slots=slots).any_bytes <= HOPPER_SHARED_BYTES
    assert (geometry.wide_tile(8192, lora=True) is not None) == wide
    assert geometry.wide_tile(8192, lora=False) == 256
    assert eager_shapes(geometry, 256, 8192)[-1] == most
    plan = plan_memory(model_of(QWEN3_30B), GraphOptions(max_loras=slots, max_lora_rank=8))
    assert plan.shapes[-1].tokens == most


@pytest.mark.parametrize("tile", WIDE_TILES)
@pytest.mark.parametrize("epilogue", [EPILOGUE_ACTIVATION, EPILOGUE_DOWN])
@pytest.mark.parametrize("lora", [False, True])
def test_the_gemm_asks_for_the_shared_memory_that_it_carves_up(
    tile: int, epilogue: int, lora: bool, tmp_path: Path
) -> None:
    config = wide_config(tile)
    asked = config.shared_bytes(staging=epilogue == EPILOGUE_ACTIVATION, lora_projections=int(lora))
    taken = "STAGES * kStageBytes + 2 * kStagingBytes + sizeof(WideRing)"
    asserts = [f"{taken} <= {asked}", f"{taken} > {asked - 16}", f"kPiece == {WIDE_PIECE}"]
    asserts += [f"kThreads == {config.threads(lora=lora)}", f"kCluster == {config.cluster}", "kStageBytes % 1024 == 0"]
    defines = defines_of(wide_gemm(config, epilogue, lora=lora))
    check(tmp_path, constants_of("common/wide_block.cuh", "struct WideMemory {"), asserts, defines)
    assert asked <= HOPPER_SHARED_BYTES < 2 * asked, "one block an SM, and no more"


def test_every_number_of_rows_has_a_width() -> None:
    """And a width begins behind the last one, so that none is wider than it must be."""
    source = (SOURCES / "common" / "wide_consumer.cuh").read_text()
    ladder = re.findall(r"if \(num_rows > (\d+)\) return run\(Width<(\d+)>", source)
    widths = sorted(int(width) for _, width in ladder)
    assert [int(least) for least, _ in reversed(ladder)] == [32, *widths[:-1]]
    assert widths[-1] == WIDE_TILES[-1]


@pytest.mark.parametrize("tile", WIDE_TILES)
@pytest.mark.parametrize(
    ("source", "part", "asked"),
    [
        ("wide_gather_shrink.cu", "Gathered", WIDE_GATHER_BYTES),
        ("wide_shrink.cu", "Activations", WIDE_SHRINK_BYTES),
    ],
)
def test_the_shrinks_ask_for_the_shared_memory_that_they_carve_up(
    tile: int, source: str, part: str, asked: int, tmp_path: Path
) -> None:
    asserts = [f"{part}::kBytes == {asked}", f"{part}::kStageBytes % 1024 == 0"]
    asserts += [f"kParts == {WIDE_PARTS[tile]}", f"kThreads == {WIDE_SHRINK_THREADS}"]
    asserts += [f"kBlocks * ({asked} + sizeof(Columns) + 1024) <= {HOPPER_SHARED_BYTES + 1024}"]
    check(tmp_path, constants_of(source, 'extern "C"'), asserts, {"MAX_N": tile, "BLOCK_M": 128})


@pytest.mark.parametrize(
    ("tokens", "slots", "tables"),
    [(257, 0, 16), (8192, 3, 16), (8192, 35, 16), (8192, 36, 1), (2048, 40, 16), (2048, 42, 1), (8192, 153, 1)],
)
def test_a_block_of_the_sort_has_a_table_a_warp_or_one(tokens: int, slots: int, tables: int) -> None:
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=slots, max_lora_rank=8)
    sizes = geometry.sort_sizes(tokens, slots=slots)
    assert sizes.wide_tables == tables
    assert sizes.wide_bytes <= HOPPER_SHARED_BYTES


def test_the_wide_sort_asks_for_the_shared_memory_that_it_carves_up(tmp_path: Path) -> None:
    """Four arrays by key, of which a block's own sums are its one table's; a warp's run of rows; those by expert."""
    asserts = [f"kThreads == {32 * SORT_WARPS}", f"kBlocks == {WIDE_SORT_BLOCKS}"]
    for tokens, slots, experts in (
        (300, 0, 128),
        (300, 0, 3),
        (301, 1, 5),
        (2048, 3, 128),
        (8192, 31, 128),
        (8192, 40, 128),
    ):
        spec = replace(QWEN3_30B, num_experts=experts, num_local_experts=experts, top_k=min(experts, 8))
        geometry = Geometry.of(spec, router_fp32=False, max_loras=slots, max_lora_rank=8)
        sizes = geometry.sort_sizes(tokens, slots=slots)
        own = "0" if sizes.wide_tables == 1 else "quads_of(KEYS)"
        by_key = f"8 * (4 * quads_of(KEYS) + {own} + {sizes.wide_tables} * quads_of(KEYS))"
        taken = f"{by_key} + 4 * (kWarps * run_of(ROWS) + 32 + 4 * {geometry.experts})"
        taken = taken.replace("KEYS", str(sizes.keys)).replace("ROWS", str(sizes.slot_rows))
        asserts.append(f"{taken} == {sizes.wide_bytes}")
    check(tmp_path, constants_of("wide_sort.cu", "// By key, four"), asserts)


@pytest.mark.parametrize("keys", [1, 2, 3, 127, 128, 1152, 65534])
def test_a_row_without_a_key_has_other_bits_than_any_key(keys: int) -> None:
    bits = SortSizes(slot_rows=8, experts=1, keys=keys).key_bits
    no_key = 0xFFFF & (1 << bits) - 1
    assert bits <= 16
    assert keys - 1 < no_key


def test_few_blocks_sort_few_slot_rows_and_no_more_than_they_can_count(tmp_path: Path) -> None:
    asserts = [f"kShare == {NARROW_SHARE}", f"kMaxRows == {NARROW_ROWS}", f"kThreads == {32 * SORT_WARPS}"]
    check(tmp_path, constants_of("narrow_sort.cu", "// What is counted"), asserts)
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=300, max_lora_rank=8)
    assert geometry.sorts_narrow(WIDE_ABOVE, slots=200)
    assert not geometry.sorts_narrow(WIDE_ABOVE + 1, slots=0), "many"
    assert not geometry.sorts_narrow(1, slots=300), "more counters than there is shared memory for"
    assert not replace(geometry, top_k=65).sorts_narrow(WIDE_ABOVE, slots=0), "more rows than fit into its counts"


def test_an_expert_mlp_takes_no_more_rows_than_it_can_count() -> None:
    """With the padding of 1024 experts they fit into 16 bits."""
    geometry = Geometry.of(QWEN3_30B, router_fp32=False, max_loras=0, max_lora_rank=8)
    geometry = replace(geometry, num_experts=1024, num_local_experts=1024)
    assert geometry.mlp_takes(MLP_TOKENS, lora=False)
    assert not geometry.mlp_takes(MLP_TOKENS + 1, lora=False)
    assert replace(geometry, top_k=9).mlp_takes(MLP_ROWS // 9, lora=False)
    assert not replace(geometry, top_k=9).mlp_takes(MLP_ROWS // 9 + 1, lora=False)
    assert MLP_ROWS + (ROW_ALIGN - 1) * 1024 < 1 << 16


@given(st.integers(2, 1 << 16), st.integers(0, 1 << 16), st.integers(-1, 1))
def test_that_sort_divides_by_a_product(divisor: int, quotient: int, beside: int) -> None:
    number = quotient * divisor + beside
    assume(0 <= number * divisor < 1 << 32)
    assert number * inverse_of(divisor) >> 32 == number // divisor
    assert 0 < inverse_of(divisor) < 1 << 32


def test_many_tokens_are_run_by_one_chain_of_programmatic_launches(layer: FakeLayer) -> None:
    few_each = layer.spec is FEW_EACH
    for variant in VARIANTS:
        runnable = layer.pool.build(variant, Plan.FUSED, captured=True)
        assert runnable.wide is not (few_each and variant.lora)
        assert runnable.graph is not None
        topology = runnable.graph.topology()
        labels = [node.label for node in topology.nodes]
        expected = (FEW_EACH_LABELS if few_each else LABELS)[variant.lora]
        first = labels.index(expected[0])
        assert labels[first:] == expected
        assert set(labels[:first]) <= {"gate", "route"}
        assert find_hazards(topology) == []
        ordering = ordering_edges(topology)
        for edge in ordering:
            assert find_hazards(topology.without(edge)) != [], labelled(topology, [edge])
        programmatic = [edge for edge in topology.edges if edge.kind is EdgeKind.PROGRAMMATIC]
        chain = list(pairwise(expected))
        assert [(labels[edge.source], labels[edge.target]) for edge in programmatic] == chain


@pytest.mark.parametrize("tokens", [WIDE_ABOVE, WIDE_ABOVE + 1, MLP_TOKENS + 1])
@pytest.mark.parametrize("plan", Plan)
def test_many_are_sorted_by_clusters_and_slots_told_where_they_are_asked_for(
    plan: Plan, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What adds a delta that is kept apart asks for the slot of each row, and nothing else does."""
    layer = FakeLayer(monkeypatch, FEW_EACH, (tokens,))
    for variant in (Variant(tokens, RoutingInput.TOPK, lora) for lora in (False, True)):
        launches = layer.pool.build(variant, plan, captured=False).program.launches
        apart = variant.lora and plan is not Plan.FUSED
        kernels = [launch.kernel.name for launch in launches]
        assert kernels[0] == ("wide_sort" if tokens > WIDE_ABOVE else "narrow_sort")
        gathers = {"wide_gather", "wide_gather_shrink"} & set(kernels)
        assert bool(gathers) is (tokens > WIDE_ABOVE and not apart)
        assert ("row_slots" in launches[0].writes) is apart
        assert any("row_slots" in launch.reads for launch in launches) is apart


def test_tiles_and_groups_are_cut_for_the_gemms_that_take_them(layer: FakeLayer) -> None:
    """Wide ones take an expert's tokens in about equal tiles, and an adapter's rows whole."""
    for variant in VARIANTS:
        launches = layer.pool.build(variant, Plan.FUSED, captured=False).program.launches
        told = next(launch.arguments.arguments for launch in launches if launch.label == "sort")
        rows = MANY * layer.geometry.choices
        cut = {name: told[name].value for name in ("group_rows", "balanced", "tile_rows")}
        if layer.spec is FEW_EACH and variant.lora:
            assert cut == {"group_rows": GROUP_ROWS, "balanced": 0, "tile_rows": 128}
        else:
            assert cut == {"group_rows": rows, "balanced": 1, "tile_rows": 128 if layer.spec is FEW_EACH else 256}


def test_plans_that_keep_the_delta_apart_have_other_gemms(layer: FakeLayer) -> None:
    for plan in (Plan.SINGLE_STREAM, Plan.TWO_STREAM, Plan.TWO_STREAM_OVERLAP_DOWN):
        runnable = layer.pool.build(Variant(MANY, RoutingInput.TOPK, True), plan, captured=False)
        assert not runnable.wide
        assert runnable.program.plan is plan


def test_launches_declare_the_buffers_they_are_given(layer: FakeLayer) -> None:
    for variant in VARIANTS:
        runnable = layer.pool.build(variant, Plan.FUSED, captured=False)
        for launch in runnable.program.launches:
            given = pointed_at(launch, runnable.arena)
            assert given <= launch.reads | launch.writes, launch.label
            assert launch.writes <= given, launch.label
            assert list(launch.arguments.arguments) == [name for _, name in parameters(launch.kernel.name)]
