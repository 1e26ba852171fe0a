"""The kernel of both products on a real GPU: the bits of the GEMMs apart, replay after replay."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from itertools import product

import pytest

from decode_cases import SPECS, batch_of, some_adapters
from gpu_engines import Gpu, gpu, same_bits
from moelet.graphs import mlp_launches
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.program import Plan

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


def test_shapes_meet_both_kernels(gpu: Gpu) -> None:
    layer = gpu.layer(SPECS["real"])
    labels = {
        shape: [launch.label for launch in layer.runnable(shape, lora=False).program.launches] for shape in SHAPES
    }
    assert "token_mlp" in labels[1]
    assert all("expert_mlp" in labels[shape] for shape in SHAPES[1:])
