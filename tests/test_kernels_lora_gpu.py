"""LoRA shrink and expand on a real GPU, each alone, over adapters of every kind: float64 by the tolerance rule."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_engines import Gpu, GpuLayer, gpu
from lora_cases import of_rank, only, ragged, uneven
from lora_groups import HALVES, Compared, assert_shrunk, grouped_rows, groups
from moelet.layer.adapter import Adapter
from moelet.layer.layout import block_major_k
from moelet.layer.spec import LayerSpec
from oracle import assert_close_to_truth
from placed_rows import assert_rest_is_poison, placed
from random_layers import normal, random_adapter

pytestmark = pytest.mark.gpu

SPEC = LayerSpec(index=0, hidden_size=2880, intermediate_size=1408, num_experts=5, top_k=2)
SHARED = LayerSpec(
    index=0, hidden_size=200, intermediate_size=104, num_experts=5, top_k=2, shared_intermediate_size=250
)
SIZES = [pytest.param(8, 8), pytest.param(61, 64), pytest.param(300, 300)]


def adapters_of(spec: LayerSpec) -> list[Adapter | None]:
    return [
        random_adapter(spec, 1, rank=3),
        random_adapter(spec, 2, rank=8, shared_outer=True),
        ragged(spec, 17, 3),
        of_rank(spec, 64, 4),
        only(spec, of_rank(spec, 24, 5), "gate"),
        only(spec, of_rank(spec, 16, 6), "up", "down"),
        uneven(spec, 20, 3),
    ]


@pytest.fixture
def layer(gpu: Gpu) -> GpuLayer:
    layer = gpu.layer(SPEC, max_tokens=300, max_loras=7, rank=64)
    if layer.adapters[0] is None:
        layer.install(adapters_of(SPEC))
    return layer


@pytest.mark.parametrize(("tokens", "shape"), SIZES)
@pytest.mark.parametrize("half", HALVES)
def test_shrink(layer: GpuLayer, half: str, tokens: int, shape: int) -> None:
    case = placed(layer, tokens, shape, lora=True)
    act = normal(torch.Generator().manual_seed(1), layer.geometry.rows(shape), SPEC.intermediate_size)
    case.runnable.arena.write("act", block_major_k(act[None], row_tile=8, swizzled=True)[0])
    layer.launch(case.runnable, f"lora_shrink of {half}")
    stored = case.runnable.arena.read(f"{half}_h").permute(1, 2, 0, 3).flatten(2)
    assert_shrunk(case, half, stored, act)


@pytest.mark.parametrize(("tokens", "shape"), SIZES)
@pytest.mark.parametrize("half", HALVES)
def test_expand(layer: GpuLayer, half: str, tokens: int, shape: int) -> None:
    case, compared, g = placed(layer, tokens, shape, lora=True), Compared(), torch.Generator().manual_seed(2)
    names, rows = HALVES[half], layer.geometry.rows(shape)
    h = torch.full((rows, len(names), layer.geometry.max_lora_rank), torch.nan).bfloat16()
    for index, projection in enumerate(names):
        for group in groups(case, projection):
            h[group.rows, index, : group.stored_rank] = 0
            h[group.rows, index, : group.rank] = normal(g, len(group.tokens), group.rank)
    arena = case.runnable.arena
    arena.write(f"{half}_h", h.unflatten(2, (-1, 8)).permute(2, 0, 1, 3).contiguous())
    layer.launch(case.runnable, f"lora_expand of {half}")
    delta = arena.read(f"{half}_delta").view(rows, -1, len(names))
    for index, projection in enumerate(names):
        for group in groups(case, projection):
            value = delta[group.rows, :, index]
            if group.rank == 0:
                assert (value == 0).all()
                continue
            mine = h[group.rows, index, : group.rank]
            features = len(group.b)
            assert (value[:, features:] == 0).all()
            compared.add(value[:, :features], mine.double() @ group.b.double().T, F.linear(mine, group.b))
    compared.check()
    assert_rest_is_poison(delta, grouped_rows(case))


def test_shared_experts_ride_in_chunks(gpu: Gpu) -> None:
    """B of gate and up is cut by rows, A of down by columns; the chunks' down deltas add up to the whole one's."""
    layer = gpu.layer(SHARED, rank=24)
    layer.install([random_adapter(SHARED, 7, rank=5)])
    adapter = layer.adapters[0]
    assert adapter is not None
    shared = adapter.layers[0]
    assert shared.shared_up is not None
    assert shared.shared_down is not None
    case = placed(layer, 64, 64, lora=True)
    act = normal(torch.Generator().manual_seed(3), layer.geometry.rows(64), layer.geometry.intermediate_stride)
    act[:, SHARED.intermediate_size :] = 0
    arena = case.runnable.arena
    arena.write("act", block_major_k(act[None], row_tile=8, swizzled=True)[0])
    layer.launch(case.runnable, "lora_shrink of gate_up", "lora_expand of gate_up")
    layer.launch(case.runnable, "lora_shrink of down", "lora_expand of down")
    up_delta, down_delta = arena.read("gate_up_delta")[:, :, 1], arena.read("down_delta")
    assert case.batch.token_slots is not None
    tokens = (case.batch.token_slots == 0).nonzero().flatten()
    places = torch.tensor(case.made.places).view(64, -1)[tokens, SHARED.top_k :]
    assert places.shape[1] == 3
    width = SHARED.intermediate_size

    x, up = case.batch.hidden_states[tokens], shared.shared_up
    scaling = float(up.scaling[0])
    value = torch.cat([up_delta[places[:, chunk], :width] for chunk in range(3)], dim=1)[:, :250]
    h = (x.double() @ up.a[0].double().T * scaling).bfloat16()
    assert_close_to_truth(value, h.double() @ up.b[0].double().T, F.linear(h, up.b[0]))

    down = shared.shared_down
    wide = torch.cat([act[places[:, chunk], :width] for chunk in range(3)], dim=1)[:, :250]
    value = sum(down_delta[places[:, chunk], :200].double() for chunk in range(3))
    scaling = float(down.scaling[0])
    truth = wide.double() @ down.a[0].double().T @ down.b[0].double().T * scaling
    error = (value - truth).norm() / truth.norm()
    assert error < 0.01, "three chunks of bf16 h and delta"
