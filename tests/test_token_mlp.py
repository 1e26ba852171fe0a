"""How the token MLP is dealt to blocks, the shapes that it is for, and its place in a graph."""

import re
from dataclasses import replace
from math import ceil

import pytest
from benchmarks.shapes import SHAPES

from fake_layer import FakeLayer
from moelet.graphs import token_mlp
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.compiler import SOURCES
from moelet.graphs.gemm_config import MOST_SHARED_BYTES
from moelet.graphs.geometry import DIRECT_ROWS, ROW_ALIGN, SHRINK_BYTES, Geometry, token_tile
from moelet.graphs.hazards import EdgeKind, Topology, find_hazards
from moelet.graphs.pool import Variant
from moelet.graphs.program import Plan
from moelet.graphs.token_mlp import SLICE_BYTES, SLICE_ROWS, TokenMlp
from moelet.layer.spec import LayerSpec
from ordering import labelled, ordering_edges
from random_layers import SHARED_SPEC

SM_COUNT = 132


def geometry_of(spec: LayerSpec) -> Geometry:
    return Geometry.of(spec, router_fp32=False, max_loras=4, max_lora_rank=16)


def of(spec: LayerSpec, tokens: int, *, lora: bool = False) -> TokenMlp | None:
    return TokenMlp.of(geometry_of(spec), tokens, lora=lora, sm_count=SM_COUNT)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_has_room_for_the_ring_and_all_beside_it(name: str, lora: bool) -> None:
    geometry = geometry_of(SHAPES[name])
    for tokens in range(1, token_mlp.TOKENS + 1):
        made = of(SHAPES[name], tokens, lora=lora)
        if made is None:
            continue
        assert made.shared_bytes + (SHRINK_BYTES if lora else 0) <= MOST_SHARED_BYTES - token_mlp.SPARE_BYTES
        assert token_mlp.LEAST_STAGES <= made.num_stages <= token_mlp.MOST_STAGES
        assert made.stages_offset % 1024 == made.stage_bytes % 1024 == 0, "as weights lie in memory"
        assert made.stage_bytes >= made.slices * SLICE_BYTES, "a K-block of an item fits into a stage"
        assert made.stage_bytes // SLICE_BYTES <= 32, "a lane a copy"
        assert made.item_blocks * made.slices <= made.down_blocks == made.stage_bytes // SLICE_BYTES
        assert made.item_blocks >= 1
        assert token_tile(geometry, tokens, lora=lora) == ROW_ALIGN, "tiles that the kernels make in a warp's registers"
        assert made.last_blocks <= made.down_blocks
        left, parts = geometry.intermediate_blocks, 0
        while left > 0:  # as the kernel deals them
            left -= min(made.down_blocks, left - made.last_blocks) if left > made.last_blocks else left
            parts += 1
        assert (left, parts) == (0, made.down_parts)
        assert made.hidden_bytes == tokens * (2 * geometry.hidden_stride + 16)
        assert made.act_bytes % (tokens * (2 * geometry.intermediate_stride + 16)) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 11, 16, 24, 48, 256])
def test_an_item_is_dealt_to_its_tile_without_a_division(parts: int) -> None:
    made = of(SHAPES["qwen3-30b-a3b"], 1)
    assert made is not None
    share = replace(made, parts=parts).part_share
    assert share < 1 << 31
    for item in range(DIRECT_ROWS * parts + 1):
        assert item * share >> 30 == item // parts


def test_one_token_of_small_experts_has_one() -> None:
    for name, spec in SHAPES.items():
        assert (of(spec, 1) is not None) == (of(spec, 1, lora=True) is not None) == (name != "mixtral-8x7b")


def test_more_experts_than_warps_are_left_to_the_expert_mlp() -> None:
    spec = SHAPES["qwen3-30b-a3b"]
    assert of(spec, 2) is None
    assert of(replace(spec, num_local_experts=32, local_expert_offset=0), 3) is not None
    assert of(replace(spec, num_local_experts=8, local_expert_offset=0), token_mlp.TOKENS + 1) is None
    many = replace(spec, num_local_experts=8, local_expert_offset=0, top_k=11)
    assert of(many, 2) is not None
    assert of(many, 3) is None, "no lane for every slot row"


@pytest.mark.parametrize("name", SHAPES)
def test_the_busiest_block_has_little_more_than_with_any_other_slices(name: str) -> None:
    spec = SHAPES[name]
    made = of(spec, 1)
    if made is None:
        return
    rows = 2 * geometry_of(spec).intermediate_stride // SLICE_ROWS
    items = {each: geometry_of(spec).hits(1) * ceil(rows / each) for each in token_mlp.SLICES}
    busiest = {each: each * ceil(count / SM_COUNT) for each, count in items.items()}
    assert busiest[made.slices] <= token_mlp.UNEVEN * min(busiest.values())


def test_the_kernel_says_the_same_of_its_block() -> None:
    text = (SOURCES / "common" / "token_block.cuh").read_text(encoding="utf-8")
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
    assert int(constants["kConsumerWarps"]) == token_mlp.WARPS
    assert int(constants["kMaxStages"]) == token_mlp.MOST_STAGES
    assert int(constants["kRowPadding"]) == token_mlp.ROW_PADDING
    assert int(constants["kFirstStages"]) <= token_mlp.LEAST_STAGES
    few = (SOURCES / "common" / "few_rows.cuh").read_text(encoding="utf-8")
    assert f"constexpr int kFewRows = {token_mlp.FEW_ROWS};" in few


def fake_slice(monkeypatch: pytest.MonkeyPatch, tokens: int) -> FakeLayer:
    pytest.importorskip("cuda.bindings.driver")
    return FakeLayer(monkeypatch, replace(SHARED_SPEC, num_local_experts=2, local_expert_offset=3), (tokens,))


def topology(layer: FakeLayer, plan: Plan, variant: Variant) -> Topology:
    graph = layer.pool.build(variant, plan, captured=True).graph
    assert graph is not None
    return graph.topology()


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_few_tokens_that_hit_few_experts_have_one_kernel(
    tokens: int, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = fake_slice(monkeypatch, tokens)
    found = topology(layer, Plan.FUSED, Variant(tokens, RoutingInput.TOPK, lora))
    assert [node.label for node in found.nodes] == ["sort", "token_mlp"]
    assert find_hazards(found) == []
    for edge in ordering_edges(found):
        assert find_hazards(found.without(edge)) != [], labelled(found, [edge])
    hasty = [replace(node, early=node.early | {"act"}) for node in found.nodes]
    assert {hazard.buffer for hazard in find_hazards(replace(found, nodes=hasty))} == {"act"}


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_the_sort_counts_parts_for_the_expert_mlp_alone(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for ever for counts that nobody made."""
    pytest.importorskip("cuda.bindings.driver")
    behind = {2: "token_mlp", 24: "expert_mlp", 200: "gather"}
    layer = FakeLayer(monkeypatch, replace(SHARED_SPEC, num_local_experts=2, local_expert_offset=3), list(behind))
    for tokens, follows in behind.items():
        runnable = layer.pool.build(Variant(tokens, RoutingInput.TOPK, lora), Plan.FUSED, captured=False)
        launches = {launch.label: launch for launch in runnable.program.launches}
        assert list(launches)[list(launches).index("sort") + 1] == follows
        pending, counts = launches["sort"].arguments.arguments.get("pending"), follows == "expert_mlp"
        given = pending.value if pending else 0
        assert given == (runnable.arena.pointer("pending") if counts else 0)
        assert ("pending" in launches["sort"].writes) is counts
        if counts:
            assert launches[follows].arguments.arguments["pending"].value == given


@pytest.mark.parametrize("plan", [plan for plan in Plan if plan is not Plan.FUSED])
def test_no_other_plan_of_so_few_has_a_hazard(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sort is the ordinary one, and nothing is awaited without a count."""
    layer = fake_slice(monkeypatch, 2)
    found = topology(layer, plan, Variant(2, RoutingInput.TOPK, True))
    assert "token_mlp" not in [node.label for node in found.nodes]
    assert find_hazards(found) == []


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_the_sort_of_few_tokens_starts_beside_the_shared_gate(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the token MLP waits for through it."""
    pytest.importorskip("cuda.bindings.driver")
    layer = FakeLayer(monkeypatch, replace(SHARED_SPEC, num_local_experts=2, local_expert_offset=0), (2,))
    found = topology(layer, Plan.FUSED, Variant(2, RoutingInput.TOPK, lora))
    assert [node.label for node in found.nodes] == ["gate", "sort", "token_mlp"]
    kinds = {(edge.source, edge.target): edge.kind for edge in found.edges}
    assert kinds == {(0, 1): EdgeKind.PROGRAMMATIC, (1, 2): EdgeKind.PROGRAMMATIC}
    assert find_hazards(found) == []
    for edge in ordering_edges(found):
        assert find_hazards(found.without(edge)) != [], labelled(found, [edge])
    forgetful = [replace(node, waits=node.label != "sort") for node in found.nodes]
    hazards = {hazard.buffer for hazard in find_hazards(replace(found, nodes=forgetful))}
    assert hazards == {"shared_weights"}
