"""GEMMs that add the LoRA delta on a real GPU: float64 by the tolerance rule, and the unfused kernels bit for bit."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_engines import GPU, Gpu, GpuLayer, exact_sums, gpu, same_bits
from lora_cases import of_every_kind, of_rank
from lora_groups import grouped_rows, groups
from moelet.graphs.arena import Arena
from moelet.graphs.gemm_config import LORA_ENTRIES, LORA_TILE, RANK_BLOCK
from moelet.graphs.geometry import token_tile
from moelet.graphs.program import Plan
from moelet.layer.adapter import Adapter
from moelet.layer.layout import block_major_k
from moelet.layer.spec import LayerSpec
from oracle import assert_close_to_truth
from placed_rows import Placed, assert_rest_is_poison, blocks_to_rows, placed
from random_layers import normal, random_batch

pytestmark = pytest.mark.gpu

LORA_RANKS = LORA_ENTRIES * RANK_BLOCK
"""Ranks of one LoRA stage."""
KEPT_APART = (Plan.SINGLE_STREAM, Plan.TWO_STREAM, Plan.TWO_STREAM_OVERLAP_DOWN)


def spec_of(hidden: int, width: int, experts: int, top_k: int) -> LayerSpec:
    return LayerSpec(index=0, hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=top_k)


def of_one_rank(count: int, rank: int) -> Callable[[LayerSpec], list[Adapter | None]]:
    return lambda spec: [of_rank(spec, rank, seed) for seed in range(count)]


@dataclass(frozen=True)
class Crowd:
    """A layer, its adapters, and the shape that they are met in."""

    spec: LayerSpec
    make: Callable[[LayerSpec], list[Adapter | None]]
    max_rank: int
    tokens: int
    shape: int
    tile: int
    one: bool = False
    """Whether all tokens are sent to one expert."""


NARROW = spec_of(2880, 1408, 9, 2)
"""A layer whose experts have too few of 300 tokens for wide GEMMs, and too many for an expert MLP."""
LOADED = spec_of(2880, 1408, 10, 2)
"""One whose experts have few enough of them for that, but too many for its tiles of 64."""
MIXED, LONE, PAIR = spec_of(2880, 1408, 5, 2), spec_of(328, 200, 1, 1), spec_of(520, 136, 2, 2)
CROWDS = {
    "tile 8": Crowd(MIXED, of_every_kind, 104, 8, 8, 8),
    "tile 16": Crowd(MIXED, of_every_kind, 104, 13, 16, 16),
    "tile 32": Crowd(MIXED, of_every_kind, 104, 29, 32, 32, one=True),
    "tile 64": Crowd(MIXED, of_every_kind, 104, 61, 64, 64),
    "tile 64 of one expert": Crowd(MIXED, of_every_kind, 104, 64, 64, 64, one=True),
    "tile 80": Crowd(LOADED, of_every_kind, 104, 290, 300, LORA_TILE),
    "tiles of 80 of one expert": Crowd(LOADED, of_every_kind, 104, 300, 300, LORA_TILE, one=True),
    "tile 128": Crowd(NARROW, of_every_kind, 104, 290, 300, 128),
    "tiles of one expert": Crowd(NARROW, of_every_kind, 104, 300, 300, 128, one=True),
    "one expert, tile 128": Crowd(LONE, of_every_kind, 104, 128, 128, 128),
    "six of rank 64": Crowd(PAIR, of_one_rank(6, 64), 64, 64, 64, 64),
    "forty adapters, one expert": Crowd(LONE, of_one_rank(40, 8), 8, 64, 64, 64),
    "forty adapters, two experts": Crowd(PAIR, of_one_rank(40, 8), 8, 64, 64, 64),
    "seventy adapters, tile 128": Crowd(LONE, of_one_rank(70, 5), 8, 128, 128, 128),
}


@cache
def adapters_of(spec: LayerSpec, make: Callable[[LayerSpec], list[Adapter | None]]) -> tuple[Adapter | None, ...]:
    """The same objects at every call, so that they are installed once."""
    return tuple(make(spec))


def layer_of(gpu: Gpu, crowd: Crowd) -> GpuLayer:
    adapters = adapters_of(crowd.spec, crowd.make)
    layer = gpu.layer(crowd.spec, max_tokens=300, max_loras=len(adapters), seed=3, rank=crowd.max_rank)
    layer.install(adapters)
    assert token_tile(layer.geometry, crowd.shape, lora=True) == crowd.tile
    return layer


def met(gpu: Gpu, crowd: Crowd) -> Placed:
    """The crowd's batch, sorted and gathered over a poisoned arena."""
    case = placed(layer_of(gpu, crowd), crowd.tokens, crowd.shape, lora=True, one=crowd.one, plan=Plan.FUSED)
    assert 0 < len(grouped_rows(case)) < len(case.rows.places), "some rows have no adapter"
    return case


def launch_unfused(case: Placed, *labels: str) -> Arena:
    """Kernels of the plan that keeps the delta apart, over what the fused ones had; its arena."""
    other = case.layer.runnable(case.runnable.variant.num_tokens, Plan.SINGLE_STREAM)
    assert other.arena.pointer("act") == case.runnable.arena.pointer("act")
    case.layer.launch(other, "sort", *labels)  # for the tickets
    return other.arena


def product(case: Placed, x: Tensor, weights: Tensor, projection: str, dtype: torch.dtype) -> Tensor:
    """``x W^T`` and its delta for every row in use, worked out on the GPU; ``x`` by permuted row."""
    places, rows = case.rows.places, torch.full((len(x), weights.shape[1]), torch.nan, dtype=dtype, device=GPU)
    with exact_sums():
        for expert in case.rows.experts.unique():
            mine = places[case.rows.experts == expert]
            rows[mine] = F.linear(x[mine].to(GPU, dtype), weights[expert].to(GPU, dtype))
        for group in groups(case, projection):
            if group.rank:
                a, b = group.a.to(GPU, dtype), group.b.to(GPU, dtype)
                rows[group.rows] += F.linear(F.linear(x[group.rows].to(GPU, dtype), a) * group.scaling, b)
    return rows[places].cpu()


@pytest.mark.parametrize("name", CROWDS)
def test_gate_up_with_delta_and_activation(gpu: Gpu, name: str) -> None:
    case = met(gpu, CROWDS[name])
    layer, arena, rows = case.layer, case.runnable.arena, case.rows
    layer.launch(case.runnable, "lora_shrink of gate_up", "gate_up_gemm")
    stored = arena.read("act")
    act = blocks_to_rows(stored, layer.geometry.intermediate_stride)
    assert_rest_is_poison(act, rows.places)

    arena.write("act", torch.full(stored.shape, -1, dtype=torch.int16).view(torch.bfloat16))
    launch_unfused(case, "lora_expand of gate_up", "gate_up_gemm", "activation")
    assert same_bits(arena.read("act"), stored)

    x = torch.zeros(len(act), layer.spec.hidden_size).bfloat16()
    x[rows.places] = case.batch.hidden_states[rows.tokens]
    weights = layer.weights.gate_up.chunk(2, dim=1)
    exact, rounded = (
        [product(case, x, side, kind, dtype) for side, kind in zip(weights, ("gate", "up"), strict=True)]
        for dtype in (torch.float64, torch.bfloat16)
    )
    value = act[rows.places]
    assert (value[:, layer.spec.intermediate_size :] == 0).all()
    value = value[:, : layer.spec.intermediate_size]
    assert_close_to_truth(value, F.silu(exact[0]) * exact[1], F.silu(rounded[0]) * rounded[1])


@pytest.mark.parametrize("name", CROWDS)
def test_down_with_delta(gpu: Gpu, name: str) -> None:
    case = met(gpu, CROWDS[name])
    layer, arena, places, hidden = case.layer, case.runnable.arena, case.rows.places, case.layer.spec.hidden_size
    act = torch.full(
        (layer.geometry.rows(CROWDS[name].shape), layer.geometry.intermediate_stride), torch.nan
    ).bfloat16()
    act[places] = 0
    act[places, : layer.spec.intermediate_size] = normal(
        torch.Generator().manual_seed(4), len(places), layer.spec.intermediate_size
    )
    arena.write("act", block_major_k(act[None], row_tile=8, swizzled=True)[0])
    layer.launch(case.runnable, "lora_shrink of down", "down_gemm")
    stored = arena.read("down")
    assert_rest_is_poison(stored, places)

    kept = launch_unfused(case, "lora_expand of down", "down_gemm")
    apart, adapted = kept.read("down_sums"), grouped_rows(case)
    apart[adapted] += kept.read("down_delta")[adapted].float()
    assert same_bits(apart.bfloat16()[places], stored[places])

    x = act[:, : layer.spec.intermediate_size]
    exact, rounded = (product(case, x, layer.weights.down, "down", dtype) for dtype in (torch.float64, torch.bfloat16))
    assert (stored[places, hidden:] == 0).all()
    assert_close_to_truth(stored[places, :hidden], exact, rounded)


def test_the_crowds_are_what_they_are_for(gpu: Gpu) -> None:
    """More adapter groups in a tile than a warp has lanes, and more blocks of ranks than one LoRA stage holds."""
    for name, least in (("forty adapters, one expert", 33), ("forty adapters, two experts", 33)):
        case = met(gpu, CROWDS[name])
        assert max(listed >> 16 for *_, listed in case.made.tiles) >= least
    case = met(gpu, CROWDS["seventy adapters, tile 128"])
    assert max(listed >> 16 for *_, listed in case.made.tiles) > 64
    case = met(gpu, CROWDS["six of rank 64"])
    assert sum(group.stored_rank // LORA_RANKS for group in groups(case, "down") if group.rows.start < 64) > 2


@pytest.mark.parametrize("name", CROWDS)
def test_every_plan_gives_the_crowd_the_same_bits(gpu: Gpu, name: str) -> None:
    crowd = CROWDS[name]
    layer = layer_of(gpu, crowd)
    batch = random_batch(crowd.spec, crowd.tokens, seed=8, slots=[-1, *range(len(layer.adapters))], drop=0.1)
    if crowd.one:
        assert batch.topk_ids is not None
        batch.topk_ids.fill_(-1)[:, 0] = crowd.spec.num_experts - 1
    wanted = layer.eager(batch, crowd.shape)
    assert wanted.isfinite().all()
    for plan in (Plan.FUSED, *KEPT_APART):
        runnable = layer.runnable(crowd.shape, plan, captured=True)
        for _ in range(3):
            layer.poison()
            assert same_bits(layer.forward(runnable, batch), wanted), plan
    for token in (0, 1, 2, 5):
        alone = layer.eager(batch.part(token, token + 1))
        assert same_bits(alone, wanted[token : token + 1]), "a token alone, without the crowd"
