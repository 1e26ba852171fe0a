"""How the token MLP is dealt to blocks: its shared memory, its ring, and the shapes that it is for."""

import re
from dataclasses import replace
from math import ceil

import pytest
from benchmarks.shapes import SHAPES

from moelet.graphs import token_mlp
from moelet.graphs.compiler import SOURCES
from moelet.graphs.gemm_config import MOST_SHARED_BYTES
from moelet.graphs.geometry import SHRINK_BYTES, Geometry
from moelet.graphs.token_mlp import SLICE_BYTES, SLICE_ROWS, TokenMlp
from moelet.layer.spec import LayerSpec

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
        assert made.hidden_bytes == tokens * (2 * geometry.hidden_stride + 16)
        assert made.act_bytes % (tokens * (2 * geometry.intermediate_stride + 16)) == 0


def test_one_token_of_small_experts_has_one() -> None:
    for name, spec in SHAPES.items():
        assert (of(spec, 1) is not None) == (of(spec, 1, lora=True) is not None) == (name != "mixtral-8x7b")


def test_more_experts_than_warps_are_left_to_the_expert_mlp() -> None:
    spec = SHAPES["qwen3-30b-a3b"]
    assert of(spec, 2) is None
    assert of(replace(spec, num_local_experts=32, local_expert_offset=0), 4) is not None
    assert of(replace(spec, num_local_experts=8, local_expert_offset=0), token_mlp.TOKENS + 1) is None


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
