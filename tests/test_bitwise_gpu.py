"""The same bits on a real GPU: replay and eager, plan and plan, alone and in a batch, with adapters that do nothing."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from decode_cases import SPECS, batch_of, rows_of, some_adapters
from gpu_engines import Gpu, GpuLayer, gpu, opened_engine, same_bits, summed_by_hand
from lora_cases import scaled, zeroed
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.gemm_config import TOKEN_TILES
from moelet.graphs.program import Plan
from moelet.layer.errors import RequestError

pytestmark = pytest.mark.gpu

SHAPES = (1, 8, 64)
PLANS = list(Plan)


@pytest.fixture(params=SPECS)
def layer(gpu: Gpu, request: pytest.FixtureRequest) -> GpuLayer:
    layer = gpu.layer(SPECS[request.param])
    layer.install(some_adapters(layer.spec))
    return layer


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("routing", RoutingInput)
def test_every_plan_captured_and_eager(layer: GpuLayer, routing: RoutingInput, lora: bool) -> None:
    for shape in SHAPES:
        batch = batch_of(layer.spec, max(shape - 3, 1), routing, lora=lora)
        first = layer.eager(batch, shape)
        assert first.abs().max() > 0
        for plan, captured in product(PLANS, (False, True)):
            runnable = layer.runnable(shape, plan, routing, lora=lora, captured=captured)
            layer.poison()
            assert same_bits(layer.forward(runnable, batch), first), (shape, plan, captured)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("plan", PLANS)
def test_ten_thousand_replays_change_nothing(layer: GpuLayer, plan: Plan, tokens: int) -> None:
    batch, main = batch_of(layer.spec, tokens, lora=True), layer.gpu.streams.main
    runnable = layer.runnable(tokens, plan, captured=True)
    assert runnable.graph is not None
    first = layer.forward(runnable, batch)
    for _ in range(10):
        for _ in range(1000):
            runnable.graph.launch(main)
        main.synchronize()
        assert same_bits(layer.staging.receive(layer.transfer(runnable, tokens), main), first)
    assert same_bits(layer.eager(batch), first)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("routing", RoutingInput)
def test_a_token_is_the_same_alone_and_in_any_company(layer: GpuLayer, routing: RoutingInput, lora: bool) -> None:
    batch = batch_of(layer.spec, 64, routing, lora=lora)
    whole = layer.eager(batch)
    for token in (0, 1, 2, 31, 63):
        for shape in SHAPES:
            assert same_bits(layer.eager(batch.part(token, token + 1), shape), whole[token : token + 1])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert same_bits(layer.eager(rows_of(batch, order)), whole[order])
    some = order[:21]
    runnable = layer.runnable(64, Plan.TWO_STREAM_OVERLAP_DOWN, routing, lora=lora, captured=True)
    assert same_bits(layer.forward(runnable, rows_of(batch, some)), whole[some])


@pytest.mark.parametrize("plan", PLANS)
def test_tokens_without_an_adapter_are_as_in_a_base_run(layer: GpuLayer, plan: Plan) -> None:
    batch = batch_of(layer.spec, 61, lora=True)
    mixed = layer.forward(layer.runnable(64, plan, captured=True), batch)
    base = layer.forward(layer.runnable(64, lora=False, captured=True), replace(batch, token_slots=None))
    assert batch.token_slots is not None
    plain = (batch.token_slots == -1) | (batch.token_slots == 3)
    assert same_bits(mixed[plain], base[plain])
    assert (mixed[~plain] != base[~plain]).any(dim=1).all(), "the adapters change every token that has one"


def test_adapters_that_do_nothing_leave_the_base(layer: GpuLayer) -> None:
    adapter = layer.adapters[0]
    assert adapter is not None
    layer.install([zeroed(layer.spec, adapter), scaled(layer.spec, adapter, 0.0)])
    batch = replace(batch_of(layer.spec, 61, lora=True), token_slots=(torch.arange(61) % 2).to(torch.int32))
    base = layer.eager(replace(batch, token_slots=None), 64)
    for plan in PLANS:
        assert same_bits(layer.forward(layer.runnable(64, plan, captured=True), batch), base)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(layer: GpuLayer, value: float) -> None:
    for routing, lora in product(RoutingInput, (False, True)):
        batch = batch_of(layer.spec, 40, routing, lora=lora)
        clean = layer.eager(batch, 64)
        assert clean.isfinite().all()
        hidden = batch.hidden_states.clone()
        hidden[[5, 17]] = value
        spoilt = replace(batch, hidden_states=hidden)
        for plan in PLANS:
            runnable = layer.runnable(64, plan, routing, lora=lora, captured=True)
            out = layer.forward(runnable, spoilt)
            others = [token for token in range(40) if token not in (5, 17)]
            assert same_bits(out[others], clean[others]), (routing, lora, plan)
            assert not out[[5, 17]].isfinite().any(), (routing, lora, plan)
            assert same_bits(layer.forward(runnable, batch), clean), "nothing of it stays behind"


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_every_token_tile_gives_the_same_bits(layer: GpuLayer, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(layer.spec, 64, lora=lora)
    assert batch.topk_ids is not None
    batch.topk_ids[:, 0] = torch.where(torch.arange(64) < 50, 5, batch.topk_ids[:, 0])  # many tiles for one expert
    first = layer.eager(batch)
    variant = layer.runnable(64, lora=lora).variant
    graphs = [module for name, module in sys.modules.items() if name.startswith("moelet.graphs.")]
    users_of_token_tile = [module for module in graphs if hasattr(module, "token_tile")]
    for tile, plan in product(TOKEN_TILES, (Plan.FUSED, Plan.SINGLE_STREAM)):
        for module in users_of_token_tile:
            monkeypatch.setattr(module, "token_tile", lambda *_, tile=tile, **__: tile)
        runnable = layer.pool.build(variant, plan, captured=False)
        layer.poison()
        assert same_bits(layer.forward(runnable, batch), first), (tile, plan)
        assert int(runnable.arena.read("num_tiles")) >= -(-50 // tile)


OPTIONS = {"max_loras": 4, "max_lora_rank": 24, "max_decode_tokens": 16, "decode_shapes": (4,), "max_eager_tokens": 40}


@pytest.mark.parametrize("name", SPECS)
def test_what_is_left_unfinalized_is_the_same_by_hand(gpu: Gpu, name: str) -> None:
    layer = gpu.layer(SPECS[name])
    with opened_engine(layer.spec, layer.weights, **OPTIONS) as engine:
        for slot, adapter in enumerate(some_adapters(layer.spec)):
            if adapter is not None:
                engine.install_adapter(slot, adapter)
        for tokens, routing, lora in product((1, 3, 16, 40), RoutingInput, (False, True)):
            batch = batch_of(layer.spec, tokens, routing, lora=lora)
            out = engine.forward(batch)
            down, weights, places = engine.forward_unfinalized(batch)
            assert (weights.shape, places.shape) == ((tokens, layer.geometry.choices),) * 2
            assert same_bits(summed_by_hand(down, weights, places), out), (tokens, routing, lora)
            used = places[places >= 0].long()
            assert len(used.unique()) == len(used)
            rest = torch.ones(len(down), dtype=torch.bool)
            rest[used] = False
            assert (down[rest] == 0).all()
        with pytest.raises(RequestError, match="1 to 40 tokens can stay unfinalized, got 41"):
            engine.forward_unfinalized(batch_of(layer.spec, 41, lora=False))


def test_two_forwards_under_way_do_not_meet(gpu: Gpu) -> None:
    """Each of many forwards, begun before the one ahead of it was waited for, gives what it gives alone."""
    spec = SPECS["real"]
    with opened_engine(
        spec, gpu.layer(spec).weights, max_loras=0, decode_shapes=[1, 8, 64], max_decode_tokens=64
    ) as engine:
        batches = [batch_of(spec, tokens, lora=False) for tokens in (1, 64, 7, 33, 100, 8, 2, 64)]
        wanted = [engine.forward(batch) for batch in batches]
        outputs, ahead = [], engine.begin(batches[0])
        for batch in [*batches[1:], *batches, *batches]:
            behind = engine.begin(batch)
            outputs.append(ahead.result())
            ahead = behind
        outputs.append(ahead.result())
        assert len(outputs) > engine.depth + 16, "more than are kept without a copy"
        assert all(same_bits(output, wanted[i % len(wanted)]) for i, output in enumerate(outputs))


def test_a_forward_in_parts_leaves_the_one_ahead_of_it_alone(gpu: Gpu) -> None:
    """A batch of more tokens than run at once, begun while an eager forward is still to be waited for."""
    spec = SPECS["real"]
    with opened_engine(
        spec, gpu.layer(spec).weights, max_loras=0, decode_shapes=[8], max_decode_tokens=8, max_eager_tokens=40
    ) as engine:
        short, long = batch_of(spec, 33, lora=False), batch_of(spec, 130, lora=False)
        wanted = [engine.forward(batch) for batch in (short, long)]
        ahead = engine.begin(short)
        behind = engine.begin(long)
        assert same_bits(ahead.result(), wanted[0])
        assert same_bits(behind.result(), wanted[1])
