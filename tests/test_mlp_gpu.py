"""The kernel of both products on a real GPU: the bits of the GEMMs apart, replay after replay."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from dataclasses import replace
from itertools import product

import pytest
import torch

from decode_cases import SPECS, batch_of, rows_of, some_adapters
from gpu_engines import Gpu, gpu, same_bits
from moelet.graphs import mlp_launches
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.program import Plan
from moelet.layer.spec import LayerSpec

pytestmark = pytest.mark.gpu

SHAPES = (1, 4, 8, 16, 24, 50, 80)
REPLAYS = 12


@pytest.mark.parametrize("rank", [0, 24, 64], ids=["base", "lora", "lora in slots of rank 64"])
@pytest.mark.parametrize("pair_rounds", [0, 1 << 20], ids=["pairs of row tiles", "single ones"])
@pytest.mark.parametrize("name", SPECS)
def test_the_bits_of_the_products_apart(
    gpu: Gpu, name: str, pair_rounds: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp_launches, "PAIR_ROUNDS", pair_rounds)
    layer, lora = gpu.layer(SPECS[name], rank=rank or 24), rank > 0
    layer.install(some_adapters(layer.spec))
    for shape, routing in product(SHAPES, RoutingInput):
        whole, apart = (
            layer.runnable(shape, Plan.FUSED, routing, lora=lora, captured=True, apart=each) for each in (False, True)
        )
        batches = [batch_of(layer.spec, tokens, routing, lora=lora) for tokens in {shape, max(shape - 3, 1)}]
        wanted = [layer.forward(apart, batch) for batch in batches]
        layer.poison()
        for _ in range(REPLAYS):  # the counts of the one before are all zero: as if everything were there
            for batch, expected in zip(batches, wanted, strict=True):
                assert same_bits(layer.forward(whole, batch), expected), (shape, routing)


CROWDED = LayerSpec(index=0, hidden_size=328, intermediate_size=328, num_experts=64, top_k=8)
SLICE = LayerSpec(
    index=0,
    hidden_size=200,
    intermediate_size=136,
    num_experts=128,
    num_local_experts=64,
    top_k=8,
    shared_intermediate_size=200,
)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("pair_rounds", [0, 1 << 20], ids=["pairs of row tiles", "single ones"])
@pytest.mark.parametrize(
    ("spec", "tokens", "shape"),
    [
        (CROWDED, 130, 130),
        (CROWDED, 300, 384),
        (CROWDED, 400, 400),
        (CROWDED, 509, 512),
        (CROWDED, 570, 576),
        (CROWDED, 890, 896),
        (SLICE, 1001, 1024),
    ],
    ids=lambda value: value if isinstance(value, int) else value.num_experts,
)
def test_crowded_experts_have_the_bits_of_fewer_tokens(
    gpu: Gpu, spec: LayerSpec, tokens: int, shape: int, pair_rounds: int, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one half and of two, of one row tile and of two, and the wider ones with adapters."""
    if lora and tokens == 890:
        pytest.skip("with adapters wide GEMMs take so many of each expert")
    monkeypatch.setattr(mlp_launches, "PAIR_ROUNDS", pair_rounds)
    layer = gpu.layer(spec, max_tokens=1024)
    layer.install(some_adapters(spec))
    few = layer.runnable(32, lora=lora, captured=True)
    many = layer.runnable(shape, lora=lora, captured=True)
    assert "expert_mlp" in [launch.label for launch in many.program.launches]
    spread = batch_of(spec, tokens, lora=lora)
    assert spread.topk_ids is not None
    eight = torch.arange(spec.local_expert_offset, spec.local_expert_offset + 8, dtype=torch.int32)
    on_eight = replace(spread, topk_ids=eight.expand(tokens, 8).contiguous())
    half = replace(spread, topk_ids=torch.where(torch.arange(tokens)[:, None] < 70, on_eight.topk_ids, spread.topk_ids))
    for batch in (spread, on_eight, half):
        parts = torch.arange(tokens).split(32)
        wanted = torch.cat([layer.forward(few, rows_of(batch, part)) for part in parts])
        layer.poison()
        for _ in range(REPLAYS):
            assert same_bits(layer.forward(many, batch), wanted)


def test_shapes_meet_both_kernels(gpu: Gpu) -> None:
    layer = gpu.layer(SPECS["real"])
    labels = {
        shape: [launch.label for launch in layer.runnable(shape, lora=False).program.launches] for shape in SHAPES
    }
    assert "token_mlp" in labels[1]
    assert all("expert_mlp" in labels[shape] for shape in SHAPES[1:])
