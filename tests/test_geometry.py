"""The sizes that buffers and grids are planned by, against every row of a batch and against the kernels' constants."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moelet.graphs.buffers import plan_buffers
from moelet.graphs.gemm_config import LORA_TILE, TOKEN_TILES, gemm_config
from moelet.graphs.geometry import CROWD_GROUP_ROWS, GROUP_ROWS, MLP_GROUP_ROWS, Geometry, token_tile
from moelet.graphs.kernels import expert_mlp
from moelet.layer.spec import LayerSpec
from permutation import permutation
from static_asserts import check, constants_of, defines_of

SPEC = LayerSpec(index=0, hidden_size=72, intermediate_size=40, num_experts=12, top_k=3)


def geometry_of(spec: LayerSpec, max_loras: int = 3) -> Geometry:
    return Geometry.of(spec, router_fp32=False, max_loras=max_loras, max_lora_rank=20)


@dataclass
class Routed:
    geometry: Geometry
    ids: list[list[int]]
    slots: list[int]
    tile: int


@st.composite
def routed(draw: st.DrawFn) -> Routed:
    """Any batch at all: repeated experts, none, experts held elsewhere, shared chunks, all on one."""
    num_experts = draw(st.integers(1, 12))
    offset = draw(st.integers(0, num_experts - 1))
    spec = replace(
        SPEC,
        num_experts=num_experts,
        num_local_experts=draw(st.integers(1, num_experts - offset)),
        local_expert_offset=offset,
        top_k=draw(st.integers(1, min(4, num_experts))),
        shared_intermediate_size=draw(st.sampled_from([0, 30, 40, 100])),
    )
    max_loras = draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 40))
    expert = st.integers(-1, num_experts - 1) if draw(st.booleans()) else st.just(offset)
    row = st.lists(expert, min_size=spec.top_k, max_size=spec.top_k)
    ids = draw(st.lists(row, min_size=tokens, max_size=tokens))
    slots = draw(st.lists(st.integers(-1, max_loras - 1), min_size=tokens, max_size=tokens))
    return Routed(geometry_of(spec, max_loras), ids, slots, draw(st.sampled_from(TOKEN_TILES)))


@settings(deadline=None, max_examples=150)
@given(routed())
@example(Routed(geometry_of(SPEC), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], [0, 1, 2, -1], 8))
def test_no_batch_takes_more_than_was_planned(case: Routed) -> None:
    geometry, tokens = case.geometry, len(case.ids)
    made = permutation(geometry, case.ids, case.slots, case.tile, geometry.group_rows(tokens))
    assert made.num_rows <= geometry.rows(tokens)
    assert len(made.tiles) <= geometry.token_tiles(tokens, case.tile)
    assert len(made.groups) <= geometry.lora_groups(tokens)
    assert geometry.rows(tokens) % 8 == 0


def spreads(rows: int, experts: int) -> Iterator[tuple[int, ...]]:
    """Every way of giving ``rows`` rows to ``experts`` experts."""
    if experts == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        yield from ((first, *rest) for rest in spreads(rows - first, experts - 1))


@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9, 17, 20])
def test_some_batch_takes_all_that_was_planned(tokens: int, experts: int) -> None:
    geometry = geometry_of(replace(SPEC, num_experts=experts, num_local_experts=-1, top_k=1), max_loras=1)
    worst_rows = max(sum(-(-count // 8) * 8 for count in spread) for spread in spreads(tokens, experts))
    assert worst_rows <= geometry.rows(tokens) <= worst_rows + 8
    for tile in (8, 16):
        worst_tiles = max(sum(-(-count // tile) for count in spread) for spread in spreads(tokens, experts))
        assert geometry.token_tiles(tokens, tile) == worst_tiles
    group = geometry.group_rows(tokens)
    worst_groups = max(sum(-(-count // group) for count in spread) for spread in spreads(tokens, experts))
    assert geometry.lora_groups(tokens) == worst_groups


@pytest.mark.parametrize(
    ("tokens", "tile", "rows"),
    [(1, 8, MLP_GROUP_ROWS), (1536, 64, MLP_GROUP_ROWS), (2048, LORA_TILE, CROWD_GROUP_ROWS)],
)
def test_the_warps_that_shrink_take_whole_groups(tmp_path: Path, tokens: int, tile: int, rows: int) -> None:
    geometry = geometry_of(replace(SPEC, num_experts=64, num_local_experts=-1, top_k=2), max_loras=1)
    assert token_tile(geometry, tokens, lora=True) == tile
    assert geometry.group_rows(tokens) == rows
    team = constants_of("common/sorted_shrink_team.cuh", "constexpr int kTeamRanks")
    defines = defines_of(expert_mlp(gemm_config(tile, lora=True), lora=True))
    check(tmp_path, team, [f"kTeamTokens == {rows}"], defines)


@pytest.mark.parametrize("loras", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 65, 400])
def test_long_groups_are_cut_and_counted(tokens: int, loras: int) -> None:
    geometry = geometry_of(replace(SPEC, num_experts=1, num_local_experts=-1, top_k=1), max_loras=loras)
    for skewed in (False, True):
        slots = [0 if skewed and token >= loras else token % loras for token in range(tokens)]
        made = permutation(geometry, [[0]] * tokens, slots, 128, geometry.group_rows(tokens))
        assert sum(rows for *_, rows in made.groups) == tokens
        assert max(rows for *_, rows in made.groups) <= (MLP_GROUP_ROWS if tokens <= 64 else GROUP_ROWS)
        assert len(made.groups) <= geometry.lora_groups(tokens)
    assert len(made.groups) == geometry.lora_groups(tokens)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile"),
    [
        (1, 8, 128, 8),
        (8, 8, 128, 8),
        (9, 8, 128, 16),
        (32, 8, 128, 32),
        (33, 8, 128, 64),
        (64, 8, 128, 64),
        (256, 8, 128, 64),
        (2048, 8, 128, 128),
        (256, 2, 8, 128),
        (128, 2, 2, 128),
        (100, 1, 1, 128),
    ],
)
def test_a_tile_holds_an_experts_tokens_where_it_can(tokens: int, top_k: int, experts: int, tile: int) -> None:
    geometry = geometry_of(replace(SPEC, num_experts=experts, num_local_experts=-1, top_k=top_k))
    assert token_tile(geometry, tokens, lora=False) == tile


@given(st.integers(1, 300), st.integers(1, 8), st.integers(8, 256))
def test_tiles_are_no_larger_than_need_be(tokens: int, top_k: int, experts: int) -> None:
    geometry = geometry_of(replace(SPEC, num_experts=experts, num_local_experts=-1, top_k=top_k))
    tile = token_tile(geometry, tokens, lora=True)
    assert tile in (*TOKEN_TILES, LORA_TILE)
    assert tile >= min(tokens, 64)
    assert all(smaller < tokens for smaller in TOKEN_TILES if smaller < tile)


QWEN = replace(SPEC, hidden_size=2048, intermediate_size=768, num_experts=128, num_local_experts=-1, top_k=8)
SLICE = replace(QWEN, num_local_experts=32)
MIXTRAL = replace(QWEN, hidden_size=4096, intermediate_size=14336, num_experts=8, num_local_experts=-1, top_k=2)
WITH_SHARED = replace(QWEN, num_experts=256, num_local_experts=-1, shared_intermediate_size=768)
SMALL_SLICE = replace(QWEN, intermediate_size=512, num_experts=256, num_local_experts=32)


@pytest.mark.parametrize(
    ("spec", "tokens", "one_kernel", "block_m"),
    [
        (QWEN, 1, False, 128),  # 96 row tiles of gate_up for 132 multiprocessors
        (QWEN, 2, True, 128),
        (QWEN, 256, True, 128),
        (QWEN, 257, True, 128),
        (QWEN, 1024, True, 128),
        (QWEN, 1792, True, 128),
        (QWEN, 1793, False, 128),  # more than 112 tokens an expert
        (SLICE, 768, True, 128),
        (SLICE, 769, False, 128),  # more than 48, of few experts
        (MIXTRAL, 192, True, 128),
        (MIXTRAL, 193, False, 128),
        (replace(QWEN, num_experts=256, num_local_experts=-1), 2048, True, 128),
        (replace(QWEN, num_experts=256, num_local_experts=-1), 2049, False, 128),
        (WITH_SHARED, 1820, True, 128),
        (WITH_SHARED, 1821, False, 128),  # more slot rows than one sort counts
        (SLICE, 1, True, 64),
        (SLICE, 2, True, 64),
        (SLICE, 4, False, 128),
        (SLICE, 8, True, 128),
        (MIXTRAL, 1, False, 128),  # 64 row tiles of down, and many of gate_up
        (MIXTRAL, 2, False, 128),
        (MIXTRAL, 4, True, 128),
        (SMALL_SLICE, 16, True, 128),  # as many row tiles, but there is no direct GEMM of 16 tokens alone
        (replace(QWEN, num_experts=8, num_local_experts=-1, top_k=2), 256, False, 128),
        (replace(QWEN, num_experts=1, num_local_experts=-1, top_k=1), 64, True, 128),  # one tile, whoever gets them
        (replace(QWEN, num_experts=1, num_local_experts=-1, top_k=1), 65, False, 128),
    ],
)
def test_where_one_kernel_has_both_products(spec: LayerSpec, tokens: int, one_kernel: bool, block_m: int) -> None:
    geometry = geometry_of(spec)
    direct = geometry.direct(tokens, lora=False)
    assert direct == (tokens <= 8)
    assert geometry.mlp(tokens, lora=False, direct=direct) == one_kernel
    assert geometry.mlp(tokens, lora=True, direct=direct) == geometry.mlp_takes(tokens, lora=True)
    assert geometry.mlp_config(tokens, lora=False, direct=direct).block_m == block_m


@pytest.mark.parametrize(("tokens", "tile"), [(64, 64), (65, 64), (768, 64), (769, 80), (1152, 80), (1153, 128)])
def test_tiles_with_adapters_grow_with_the_mean_load(tokens: int, tile: int) -> None:
    geometry = geometry_of(QWEN)
    assert token_tile(geometry, tokens, lora=True) == tile
    assert token_tile(geometry, tokens, lora=False) == 64


def test_with_adapters_one_kernel_takes_more_tokens_of_few_experts() -> None:
    for spec, base, lora in ((SLICE, 768, 1024), (MIXTRAL, 192, 256)):
        geometry = geometry_of(spec)
        for tokens in (base, base + 1, lora, lora + 1):
            assert geometry.mlp_takes(tokens, lora=False) == (tokens <= base)
            assert geometry.mlp_takes(tokens, lora=True) == (tokens <= lora)
            assert token_tile(geometry, tokens, lora=True) == (64 if tokens <= base else 80 if tokens <= lora else 128)


def test_tiles_of_many_tokens_have_two_halves_without_adapters(tmp_path: Path) -> None:
    geometry = geometry_of(QWEN)
    for tokens, lora, halves in ((256, False, 1), (257, False, 2), (257, True, 1), (1024, False, 2), (1024, True, 1)):
        config = geometry.mlp_config(tokens, lora=lora, direct=False)
        assert (config.halves, config.tile_rows) == (halves, halves * config.max_n)
        defines = defines_of(expert_mlp(config, lora=lora))
        asserts = [f"HALVES * MAX_N == {config.tile_rows}", f"kThreads == {config.threads(lora=lora, mlp=True)}"]
        check(tmp_path, '#include "common/gemm_block.cuh"', asserts, defines)


@pytest.mark.parametrize(("hidden_size", "stages"), [(2048, 9), (4096, 9), (5120, 6), (7168, 6)])
def test_rings_of_few_tokens_are_longer_where_hidden_states_leave_room(hidden_size: int, stages: int) -> None:
    geometry = geometry_of(replace(QWEN, hidden_size=hidden_size))
    assert geometry.direct(4, lora=False)
    assert geometry.mlp_config(4, lora=False, direct=True).stages == stages
    assert geometry.mlp_config(4, lora=True, direct=True).stages == 6
    assert geometry.mlp_config(4, lora=False, direct=False).stages == 12


@pytest.mark.parametrize("hidden_size", [1, 64, 65, 72, 128, 960, 2880])
@pytest.mark.parametrize("width", [1, 40, 64, 100, 1408])
def test_padded_sizes_are_whole_tiles(hidden_size: int, width: int) -> None:
    geometry = geometry_of(replace(SPEC, hidden_size=hidden_size, intermediate_size=width))
    assert hidden_size <= geometry.hidden_stride < hidden_size + 64
    assert hidden_size <= geometry.output_stride < hidden_size + 128
    assert width <= geometry.intermediate_stride < width + 64
    assert geometry.hidden_stride % 64 == geometry.intermediate_stride % 64 == geometry.output_stride % 128 == 0
    assert 2 * geometry.intermediate_stride % gemm_config(8).block_m == 0


@given(st.integers(1, 200), st.integers(0, 2))
@example(192, 0)  # the last that an expert MLP takes
@example(64, 0)
def test_a_larger_shape_needs_no_smaller_buffer(tokens: int, chunks: int) -> None:
    geometry = geometry_of(replace(SPEC, shared_intermediate_size=40 * chunks))
    small, large = (plan_buffers(geometry, count, lora=True).buffers for count in (tokens, tokens + 1))
    shrunk = {name for name, spec in small.items() if large[name].num_bytes < spec.num_bytes}
    assert shrunk <= {"tiles", "groups"}, "fewer: a larger tile holds more, and longer groups go with tiles of 128"
    assert "groups" not in shrunk or geometry.group_rows(tokens) < geometry.group_rows(tokens + 1)
