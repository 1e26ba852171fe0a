"""Packed adapters: what an install copies is what packing says, in whatever pieces it passes."""

from dataclasses import replace

import pytest
import torch

from fake_driver import FakeDriver
from moelet.graphs import adapters
from moelet.graphs.adapters import AdapterSlots, SlotBank
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.geometry import Geometry
from moelet.graphs.packed import SLABS, Packer, Run, _zeros, runs_of
from moelet.graphs.packing import entries, pieces
from moelet.graphs.streams import Stream
from moelet.layer.adapter import Adapter
from moelet.layer.spec import LayerSpec
from random_layers import model_of, random_adapter

SLOTS, RANK, SLOT = 3, 24, 1
SPECS = [
    LayerSpec(
        index=0,
        hidden_size=328,
        intermediate_size=200,
        num_experts=12,
        top_k=3,
        shared_intermediate_size=300,
        shared_gated=True,
    ),
    LayerSpec(
        index=0,
        hidden_size=128,
        intermediate_size=96,
        num_experts=8,
        top_k=2,
        num_local_experts=3,
        local_expert_offset=2,
    ),
]


def packer_of(spec: LayerSpec) -> Packer:
    return Packer.of(model_of(spec), max_loras=SLOTS, max_lora_rank=RANK)


def slots_of(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch, *, batches: bool = True) -> AdapterSlots:
    fake = FakeDriver().install(monkeypatch)
    fake.without = frozenset() if batches else frozenset({b"cuMemcpy3DBatchAsync"})
    slots = AdapterSlots(spec, Geometry.of(spec, router_fp32=False, max_loras=SLOTS, max_lora_rank=RANK))
    for buffer in slots._memory.values():
        buffer.write(torch.full((buffer.num_bytes,), 7, dtype=torch.uint8))
    return slots


def held(slots: AdapterSlots, slab: str) -> torch.Tensor:
    """The bytes of every slot in ``slab``, ``[slots, experts, bytes]``."""
    buffer = slots._memory[slab]
    return buffer.read(
        torch.uint8, (SLOTS, slots.geometry.experts, buffer.num_bytes // SLOTS // slots.geometry.experts)
    )


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("staging", [1 << 22, 1])
@pytest.mark.parametrize("spec", SPECS, ids=["shared", "sliced"])
@pytest.mark.parametrize(("rank", "shared_outer"), [(8, False), (3, False), (20, False), (5, True), (16, True)])
def test_an_install_writes_what_packing_says_and_nothing_else(
    spec: LayerSpec, rank: int, shared_outer: bool, staging: int, batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory that holds a single row at a time makes no difference, nor a driver that copies one by one."""
    monkeypatch.setattr(adapters, "STAGING_BYTES", staging)
    slots = slots_of(spec, monkeypatch, batches=batches)
    bank = SlotBank({0: slots}, RANK, Stream("copy"))
    adapter = random_adapter(spec, 3, rank=rank, shared_outer=shared_outer)
    expected = {slab: held(slots, slab).clone() for slab in SLABS}
    for piece in pieces(adapter.layers[0], spec, slots.geometry):
        packed = piece.packed
        rows = packed.tensor().view(torch.uint8)
        last = piece.first_expert + packed.num_experts
        expected[piece.slab][SLOT, piece.first_expert : last, piece.offset : piece.offset + packed.expert_bytes] = rows
    table = torch.from_numpy(entries(adapter.layers[0], spec, slots.geometry).view("u1"))
    expected["lora"][SLOT] = table.view(slots.geometry.experts, -1)
    bank.install(SLOT, packer_of(spec).pack(adapter))
    assert all(torch.equal(held(slots, slab), expected[slab]) for slab in SLABS)
    bank.remove(SLOT)
    expected["lora"][SLOT] = 0
    assert all(torch.equal(held(slots, slab), expected[slab]) for slab in SLABS)


def test_an_adapter_that_is_not_packed_is_installed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, adapter = SPECS[0], random_adapter(SPECS[0], 5, rank=7)
    found = []
    for form in (adapter, packer_of(spec).pack(adapter)):
        slots = slots_of(spec, monkeypatch)
        SlotBank({0: slots}, RANK, Stream("copy")).install(SLOT, form)
        found.append([held(slots, slab) for slab in SLABS])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_one_a_of_gate_and_up_is_packed_once() -> None:
    spec = SPECS[1]
    adapter = random_adapter(spec, 5, rank=8)
    layer = adapter.layers[0]
    assert layer.gate is not None
    assert layer.up is not None
    shared = replace(adapter, layers={0: replace(layer, up=replace(layer.up, a=layer.gate.a))})
    packed, apart = packer_of(spec).pack(shared), packer_of(spec).pack(adapter)
    first, second = (Run(*run) for run in runs_of(packed.runs.copied()).tolist()[:2])
    assert first.place == second.place
    assert first.offset != second.offset
    assert packed.content.nbytes == apart.content.nbytes - first.width * first.rows


def test_what_is_told_of_a_packed_adapter_is_what_is_told_of_it() -> None:
    spec, adapter = SPECS[0], random_adapter(SPECS[0], 5, rank=16, shared_outer=True)
    packed = packer_of(spec).pack(adapter)
    assert adapter.facts is adapter.facts
    assert packed.facts == replace(adapter.facts, nbytes=packed.content.nbytes + packed.runs.nbytes)


def test_packing_without_room_is_too_little_memory() -> None:
    """And no fault of the adapter's files, as any other error of the system is."""
    with pytest.raises(MemoryError, match=f"an adapter of {1 << 60} bytes"):
        _zeros(1 << 60)


def test_a_layer_that_an_adapter_leaves_alone_gets_an_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[1]
    slots = slots_of(spec, monkeypatch)
    bank = SlotBank({0: slots}, RANK, Stream("copy"))
    other = Adapter(path=random_adapter(spec, 1, rank=8).path, rank=8, lora_alpha=8.0, scaling=1.0, layers={})
    bank.install(SLOT, packer_of(spec).pack(other))
    assert not held(slots, "lora")[SLOT].any()
    assert held(slots, "lora")[SLOT + 1].any()


def test_a_batch_of_copies_that_fails_is_an_error_and_spoils_no_install_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FailingDriver(FakeDriver):
        failing = False

        def cuMemcpy3DBatchAsync(self, count, operations, flags, stream):  # type: ignore[no-untyped-def]
            if self.failing:
                return int(driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)
            return super().cuMemcpy3DBatchAsync(count, operations, flags, stream)

    fake, spec = FailingDriver(), SPECS[1]
    fake.install(monkeypatch)
    slots = AdapterSlots(spec, Geometry.of(spec, router_fp32=False, max_loras=SLOTS, max_lora_rank=RANK))
    bank = SlotBank({0: slots}, RANK, Stream("copy"))
    first, second = (packer_of(spec).pack(random_adapter(spec, seed, rank=8)) for seed in (1, 2))
    bank.install(SLOT, first)
    wanted = [held(slots, slab) for slab in SLABS]
    fake.failing = True
    with pytest.raises(DriverError, match=r"^cuMemcpy3DBatchAsync failed with CUDA_ERROR_NOT_SUPPORTED"):
        bank.install(SLOT, second)
    fake.failing = False
    assert all(torch.equal(held(slots, slab), kept) for slab, kept in zip(SLABS, wanted, strict=True))
    bank.install(SLOT, second)
    bank.install(SLOT, first)
    assert all(torch.equal(held(slots, slab), kept) for slab, kept in zip(SLABS, wanted, strict=True))


def test_installs_of_one_shape_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come out right from what was prepared for another adapter."""
    spec = SPECS[0]
    slots = slots_of(spec, monkeypatch)
    bank = SlotBank({0: slots}, RANK, Stream("copy"))
    found = []
    for seed in (1, 2, 1):
        bank.install(SLOT, packer_of(spec).pack(random_adapter(spec, seed, rank=8)))
        found.append([held(slots, slab) for slab in SLABS])
    assert bank._remembered.cache_info().misses == 1
    assert all(torch.equal(left, right) for left, right in zip(found[0], found[2], strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(found[0], found[1], strict=True))
