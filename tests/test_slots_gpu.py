"""Adapter slots on a real GPU: each is filled and emptied by itself, nothing stays behind, and nothing is allocated."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_cases import SPECS, batch_of
from gpu_engines import Gpu, GpuLayer, gpu, opened_engine, same_bits
from lora_cases import of_rank, only, ragged, uneven
from moelet.graphs import adapters, kernels, row_copies
from moelet.graphs.adapters import SlotBank
from moelet.graphs.driver import driver
from moelet.graphs.engine import GraphEngine
from moelet.graphs.gemm_config import gemm_config
from moelet.graphs.kernels import Kernels
from moelet.graphs.residency import device_view
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import AdapterRefusedError, EngineError
from moelet.layer.spec import LayerSpec
from random_layers import random_batch, random_weights

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "max_loras": 4,
    "max_lora_rank": 64,
    "max_decode_tokens": 16,
    "decode_shapes": (1, 4),
    "max_eager_tokens": 40,
}

weights_of = cache(random_weights)


@pytest.fixture(scope="module", params=SPECS)
def engine(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[GraphEngine]:  # noqa: ARG001 (skips without one)
    spec = SPECS[request.param]
    with opened_engine(spec, weights_of(spec), **OPTIONS) as engine:
        yield engine


def spec_of(engine: GraphEngine) -> LayerSpec:
    return engine.model.layers[0]


def outputs(engine: GraphEngine, slot: int, *, captured: bool = True) -> Tensor:
    """The forward of a batch whose every token has the adapter in ``slot`` (-1: none)."""
    spec, tokens = spec_of(engine), 13 if captured else 37
    return engine.forward(random_batch(spec, tokens, seed=tokens, slots=None if slot < 0 else [slot]))


def fresh(engine: GraphEngine, adapter: Adapter) -> Tensor:
    """What an engine gives in whose slots nothing has ever been but ``adapter``."""
    with opened_engine(spec_of(engine), weights_of(spec_of(engine)), **OPTIONS) as other:
        other.install_adapter(2, adapter)
        return outputs(other, 2)


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one(engine: GraphEngine) -> None:
    spec = spec_of(engine)
    small = of_rank(spec, 3, 2)
    wanted = fresh(engine, small)
    for large in (of_rank(spec, 64, 1), ragged(spec, 60, 3), of_rank(spec, 24, 4, shared_outer=True)):
        engine.install_adapter(2, large)
        engine.install_adapter(2, small)
        assert same_bits(outputs(engine, 2), wanted)
    engine.install_adapter(2, of_rank(spec, 64, 1))
    one_sided = [only(spec, small, name) for name in ("gate", "up", "down")]
    for adapter in (*one_sided, uneven(spec, 20, 3), uneven(spec, 0, 24), uneven(spec, 40, 0, 1)):
        engine.install_adapter(2, adapter)
        assert same_bits(outputs(engine, 2), fresh(engine, adapter))


def test_removing_empties_a_slot(engine: GraphEngine) -> None:
    for captured in (True, False):
        base = outputs(engine, -1, captured=captured)
        engine.install_adapter(1, of_rank(spec_of(engine), 64, 5))
        assert not same_bits(outputs(engine, 1, captured=captured), base)
        engine.remove_adapter(1)
        assert same_bits(outputs(engine, 1, captured=captured), base)
        engine.remove_adapter(1)
        assert same_bits(outputs(engine, 1, captured=captured), base)


def test_an_adapter_of_another_layer_changes_nothing_here(engine: GraphEngine) -> None:
    adapter = of_rank(spec_of(engine), 8, 6)
    engine.install_adapter(0, adapter)
    engine.install_adapter(0, replace(adapter, layers={9: adapter.layers[0]}))
    assert same_bits(outputs(engine, 0), outputs(engine, -1))
    engine.remove_adapter(0)


def test_what_does_not_fit_is_refused_and_changes_nothing(engine: GraphEngine) -> None:
    spec = spec_of(engine)
    engine.install_adapter(3, of_rank(spec, 16, 7))
    before = outputs(engine, 3)
    with pytest.raises(AdapterRefusedError, match="a rank of at most 64, found 65"):
        engine.install_adapter(3, of_rank(spec, 65, 8))
    for slot in (-1, 4):
        with pytest.raises(EngineError, match=f"there is no adapter slot {slot}: the slots are 0 to 3"):
            engine.install_adapter(slot, of_rank(spec, 1))
        with pytest.raises(EngineError, match=f"there is no adapter slot {slot}"):
            engine.remove_adapter(slot)
    assert same_bits(outputs(engine, 3), before)
    engine.remove_adapter(3)


def slot_bytes(layer: GpuLayer) -> dict[str, Tensor]:
    """A copy of every slab of a layer's slots and of the table, ``[slots, bytes / 2]``."""
    args, geometry, names = layer.resident.args, layer.geometry, ("a_gate_up", "b_gate_up", "a_down", "b_down")
    rank, wide, narrow = geometry.max_lora_rank, geometry.hidden_stride, geometry.intermediate_stride
    sizes = (2 * rank * wide, 2 * rank * narrow, rank * narrow, rank * geometry.output_stride)
    found = {}
    for name, size in (*zip(names, sizes, strict=True), ("", 16)):
        address = int(args[f"lora_{name}".removesuffix("_")])
        shape = (geometry.max_loras, geometry.experts * size)
        found[name] = device_view(address, shape, layer.gpu.device.ordinal).view(torch.int16).cpu()
    return found


def test_installing_writes_to_no_other_slot(gpu: Gpu) -> None:
    for spec in SPECS.values():
        layer = gpu.layer(spec, rank=64)
        layer.install([of_rank(spec, 24, slot) for slot in range(4)])
        batch = batch_of(spec, 40, lora=True)
        assert batch.token_slots is not None
        before, output = slot_bytes(layer), layer.eager(batch)
        for adapter in (of_rank(spec, 64, 9), ragged(spec, 17, 10), of_rank(spec, 8, 11, shared_outer=True), None):
            layer.install([*layer.adapters[:2], adapter, layer.adapters[3]])
            after, others = slot_bytes(layer), [0, 1, 3]
            for name, kept in before.items():
                assert torch.equal(after[name][others], kept[others]), name
            assert not torch.equal(after[""][2], before[""][2])
            unchanged = batch.token_slots != 2
            assert same_bits(layer.eager(batch)[unchanged], output[unchanged])


@pytest.mark.parametrize("staging", [adapters.STAGING_BYTES, 1])
def test_one_call_of_the_driver_copies_what_a_call_for_each_does(
    gpu: Gpu, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece or many, over what was there before."""
    monkeypatch.setattr(adapters, "STAGING_BYTES", staging)
    for spec in SPECS.values():
        layer, found = gpu.layer(spec, rank=64), []
        layer.install([of_rank(spec, 24, slot) for slot in range(4)])
        for batches in (True, False):
            with monkeypatch.context() as patched:
                if not batches:
                    patched.setattr(row_copies, "batch_call", lambda: None)
                bank = SlotBank({spec.index: layer.slots}, 64, gpu.streams.copy)
            assert (bank._passage._copies._batch is not None) == batches
            for adapter in (of_rank(spec, 64, 9), ragged(spec, 17, 10), of_rank(spec, 8, 11, shared_outer=True)):
                bank.install(1, of_rank(spec, 64, 5))
                bank.install(1, adapter)
                found.append(slot_bytes(layer))
            bank.remove(1)
            found.append(slot_bytes(layer))
            bank._passage.close()
        layer.adapters[1] = None
        for together, each in zip(found[:4], found[4:], strict=True):
            assert all(torch.equal(together[name], each[name]) for name in each)


def test_two_hundred_installs_take_no_memory(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    taking_turns = [of_rank(spec_of(engine), rank, rank) for rank in (64, 3)]
    for adapter in taking_turns:
        engine.install_adapter(1, adapter)
    wanted = outputs(engine, 1)
    for name in ("cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister"):
        monkeypatch.setattr(driver, name, lambda *_, name=name: pytest.fail(f"an install called {name}"))
    for turn in range(200):
        engine.install_adapter(1, taking_turns[turn % 2])
        if turn % 50 == 49:
            engine.remove_adapter(1)
            engine.install_adapter(1, taking_turns[1])
            assert same_bits(outputs(engine, 1), wanted)
    engine.remove_adapter(1)


CREATING = (
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuStreamCreate",
    "cuEventCreate",
    "cuModuleLoadData",
    "cuStreamBeginCapture",
    "cuGraphInstantiate",
)


def test_nothing_is_created_once_the_engine_has_started(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was created after start-up")

    for name in CREATING:
        monkeypatch.setattr(driver, name, refuse)
    spec = spec_of(engine)
    base = outputs(engine, -1)
    for slot in range(4):
        engine.install_adapter(slot, of_rank(spec, 8 * slot + 1, slot))
    for tokens in (1, 3, 16, 17, 40, 90):
        for batch in (random_batch(spec, tokens, slots=[0, 1, -1, 2, 3]), random_batch(spec, tokens)):
            engine.forward(batch)
            engine.forward(replace(batch, topk_ids=None, topk_weights=None))
    for slot in range(4):
        engine.remove_adapter(slot)
    assert same_bits(outputs(engine, -1), base)


def test_sealed_kernels_compile_and_load_nothing_more(gpu: Gpu) -> None:
    loaded = Kernels(gpu.device.arch, gpu.device.max_shared_memory)
    spin = loaded.get(kernels.spin())
    loaded.seal()
    assert loaded.get(kernels.spin()) is spin
    with pytest.raises(RuntimeError, match=r"grouped_gemm\.cu .* was asked for after start-up"):
        loaded.get(kernels.grouped_gemm(gemm_config(8), kernels.EPILOGUE_DOWN, lora=False), dynamic=True)
    loaded.close()
