"""Batches of many tokens that give tiles few rows, adapters without ranks, or more adapters than a warp has lanes."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from gpu_engines import Gpu, GpuLayer, expected, gpu, same_bits
from lora_cases import at_experts, of_every_kind, of_rank, only
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec, RoutingSpec
from oracle import assert_close_to_truth
from random_layers import random_batch

pytestmark = pytest.mark.gpu

TOKENS, RANK = 300, 104
SMALL = LayerSpec(
    index=0, hidden_size=64, intermediate_size=64, num_experts=2, top_k=2, routing=RoutingSpec(renormalize=True)
)
SPARE = replace(SMALL, hidden_size=520, intermediate_size=136, num_experts=4)


def forwarded(gpu: Gpu, spec: LayerSpec, adapters: Sequence[Adapter | None], batch: LayerBatch) -> GpuLayer:
    """A layer after a forward of ``batch`` by wide GEMMs that is close to the truth, and the same captured."""
    layer = gpu.layer(spec, max_tokens=TOKENS, max_loras=max(len(adapters), 8), seed=3, rank=RANK)
    layer.install(adapters)
    lora = batch.token_slots is not None
    known = expected(spec, layer.weights, batch, adapters)
    layer.poison()
    runnable = layer.runnable(TOKENS, lora=lora)
    assert runnable.wide
    out = layer.forward(runnable, batch)
    assert_close_to_truth(out, known.truth, known.baseline)
    captured = layer.runnable(TOKENS, lora=lora, captured=True)
    layer.poison()
    assert same_bits(layer.forward(captured, batch), out)
    return layer


@pytest.mark.parametrize("without_ranks", [0, 8])
def test_a_tile_of_more_adapters_than_a_warp_has_lanes(gpu: Gpu, without_ranks: int) -> None:
    """Of an expert's two tiles the second has 40, of which the last 8 may have no rank."""
    kinds = of_every_kind(SMALL)[:-1]
    adapters = [*kinds * 11][: 77 - without_ranks] + [at_experts(SMALL, of_rank(SMALL, 16))] * without_ranks
    forwarded(gpu, SMALL, adapters, random_batch(SMALL, TOKENS, seed=4, slots=[-1, *range(len(adapters))]))


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9])
def test_an_expert_of_few_rows_beside_others_of_many(gpu: Gpu, rows: int, lora: bool) -> None:
    adapters = [of_rank(SPARE, 16, seed) for seed in range(3)] if lora else []
    batch = random_batch(SPARE, TOKENS, seed=5, slots=[0, -1, 1, 2] if lora else None)
    assert batch.topk_ids is not None
    ids = torch.tensor([[1, 2]], dtype=torch.int32).repeat(TOKENS, 1)
    ids[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(rows))[:rows], 1] = 3
    forwarded(gpu, SPARE, adapters, replace(batch, topk_ids=ids))


def test_adapters_of_which_none_has_a_rank_at_the_experts_asked_for(gpu: Gpu) -> None:
    nowhere = at_experts(SPARE, of_rank(SPARE, 16), 0, 3)
    batch = random_batch(SPARE, TOKENS, seed=6, slots=[0, 1])
    batch = replace(batch, topk_ids=torch.tensor([[1, 2]], dtype=torch.int32).repeat(TOKENS, 1))
    layer = forwarded(gpu, SPARE, [nowhere, nowhere], batch)
    base = replace(batch, token_slots=None)
    assert same_bits(layer.eager(batch, TOKENS), layer.eager(base, TOKENS))


@pytest.mark.parametrize("projections", [("gate",), ("up",), ("down",), ("gate", "down")])
def test_batches_of_one_sided_adapters_alone(gpu: Gpu, projections: tuple[str, ...]) -> None:
    adapters = [only(SPARE, of_rank(SPARE, rank, rank), *projections) for rank in (5, 24)]
    forwarded(gpu, SPARE, adapters, random_batch(SPARE, TOKENS, seed=7, slots=[0, 1]))
    forwarded(gpu, SMALL, [only(SMALL, of_rank(SMALL, 40), *projections)], random_batch(SMALL, TOKENS, slots=[0]))


def test_tokens_without_an_adapter_among_shapes_with_adapters(gpu: Gpu) -> None:
    batch = random_batch(SPARE, TOKENS, seed=8, slots=[-1])
    layer = forwarded(gpu, SPARE, [of_rank(SPARE, 16)], batch)
    assert same_bits(layer.eager(batch, TOKENS), layer.eager(replace(batch, token_slots=None), TOKENS))
