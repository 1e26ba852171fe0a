"""A batch on the GPU after sort and gather, its rows looked up by plain loops: what later kernels are tried on."""

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_engines import GpuLayer
from moelet.graphs.geometry import token_tile
from moelet.graphs.pool import Runnable
from moelet.graphs.program import Plan
from moelet.layer.engine import LayerBatch
from moelet.layer.layout import from_block_major_k
from permutation import Permutation, permutation
from random_layers import random_batch


class Rows(NamedTuple):
    """The permuted rows in use: their places, tokens and experts."""

    places: Tensor
    tokens: Tensor
    experts: Tensor


class Placed(NamedTuple):
    """A batch on the GPU, sorted and gathered: what the later kernels find."""

    layer: GpuLayer
    batch: LayerBatch
    runnable: Runnable
    made: Permutation
    rows: Rows


def placed(
    layer: GpuLayer, tokens: int, shape: int, *, lora: bool, one: bool = False, plan: Plan = Plan.SINGLE_STREAM
) -> Placed:
    """Sort and gather a random batch over a poisoned arena; ``one``: all tokens on the last expert.

    With ``lora``, ``plan`` says which GEMMs follow, and where those are wide the gather shrinks gate and up too.
    """
    slots = [-1, *range(len(layer.adapters))]
    batch = random_batch(layer.spec, tokens, seed=tokens, slots=slots, drop=0.1)
    assert batch.topk_ids is not None
    assert batch.token_slots is not None
    if one:
        batch.topk_ids.fill_(-1)[:, 0] = layer.spec.num_experts - 1
    runnable = layer.runnable(shape, plan, lora=lora, apart=True)
    layer.poison()
    layer.send(runnable, batch)
    labels = [launch.label for launch in runnable.program.launches]
    gathers = next(i for i, label in enumerate(labels) if label.startswith("gather"))
    layer.launch(runnable, *labels[: gathers + 1])
    token_slots = batch.token_slots.tolist() if lora else None
    wide = layer.geometry.wide_tile(shape, lora=lora) if runnable.wide else None
    tile = wide or token_tile(layer.geometry, shape, lora=lora)
    ids, group_rows = batch.topk_ids.tolist(), layer.geometry.group_rows(shape)
    made = permutation(layer.geometry, ids, token_slots, tile, group_rows, balanced=runnable.wide)
    used = [(place, row // layer.geometry.choices) for row, place in enumerate(made.places) if place >= 0]
    places, tokens_of = torch.tensor(used).unbind(1)
    experts = torch.empty_like(places)
    for expert, first, count, _ in made.tiles:
        experts[(places >= first) & (places < first + count)] = expert
    return Placed(layer, batch, runnable, made, Rows(places, tokens_of, experts))


def blocks_to_rows(stored: Tensor, columns: int) -> Tensor:
    return from_block_major_k(stored[None], stored.shape[1], columns, swizzled=True)[0]


def assert_rest_is_poison(stored: Tensor, places: Tensor) -> None:
    """No byte of a row that holds no token was written."""
    rest = torch.ones(len(stored), dtype=torch.bool)
    rest[places] = False
    assert (stored[rest].contiguous().view(torch.uint8) == 0xFF).all()
