"""Replays of every kind in any order on a real GPU, back to back while adapters move: always what eager runs gave."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from gpu_engines import Gpu, GpuLayer, gpu, same_bits
from moelet.graphs.adapters import SlotBank
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.driver import Device
from moelet.graphs.geometry import Geometry
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer, copy_to_host
from moelet.graphs.pool import Runnable, arena_memory
from moelet.graphs.program import Plan
from moelet.graphs.staging import Staging
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec
from random_layers import random_adapter, random_batch, random_weights

pytestmark = pytest.mark.gpu

SPEC = LayerSpec(
    index=0,
    hidden_size=328,
    intermediate_size=200,
    num_experts=12,
    top_k=3,
    shared_intermediate_size=300,
    shared_gated=True,
)
SPECS = [
    SPEC,
    replace(SPEC, index=1),
    LayerSpec(index=2, hidden_size=1024, intermediate_size=384, num_experts=16, top_k=4),
]
SHAPES = (1, 4, 24, 64)
MOST = 64
FIXED, SWAPPED, FILLED = 0, 1, 3
"""Slots: one that stays, one that changes between batches, one that no batch uses and a thread fills."""
ROUNDS, IN_FLIGHT = 120, 8


@dataclass
class Item:
    """A replay, and what eager runs gave for it by the adapter in the slot that is swapped."""

    layer: GpuLayer
    runnable: Runnable
    batch: LayerBatch
    wanted: list[Tensor]


class Lane:
    """Room for one forward in flight: its inputs and its output on the host."""

    def __init__(self, layers: list[GpuLayer]) -> None:
        self.stagings = {id(layer): Staging(layer.geometry, MOST) for layer in layers}
        self.output = PinnedBuffer(max(MOST * layer.geometry.output_stride * 2 for layer in layers))

    def start(self, item: Item) -> None:
        """Copy in, replay, copy out, waiting for none of it."""
        main, runnable = item.layer.gpu.streams.main, item.runnable
        transfer = item.layer.transfer(runnable, item.batch.num_tokens)
        self.stagings[id(item.layer)].send(item.batch, item.layer.resident.head, transfer, main)
        runnable.run(main)
        num_bytes = item.batch.num_tokens * item.layer.geometry.output_stride * 2
        copy_to_host(self.output.pointer, runnable.arena.pointer("output"), num_bytes, main)

    def result(self, item: Item) -> Tensor:
        """The output, once the main stream has been waited for."""
        staged = self.output.tensor(torch.bfloat16, (item.batch.num_tokens, item.layer.geometry.output_stride))
        return staged[:, : item.layer.spec.hidden_size].clone()

    def close(self) -> None:
        for owned in (*self.stagings.values(), self.output):
            owned.close()


@pytest.fixture(scope="module")
def memory(gpu: Gpu) -> Iterator[DeviceBuffer]:
    """What the arenas of all layers share, as in an engine."""
    geometries = [Geometry.of(spec, router_fp32=False, max_loras=4, max_lora_rank=24) for spec in SPECS]
    memory = arena_memory(geometries, [MOST], MOST)
    yield memory
    gpu.streams.synchronize()
    memory.close()


@pytest.fixture(scope="module")
def layers(gpu: Gpu, memory: DeviceBuffer) -> Iterator[list[GpuLayer]]:
    """Two layers of one geometry and one of another."""
    layers = [GpuLayer(gpu, spec, random_weights(spec, spec.index), MOST, 4, 24, memory) for spec in SPECS]
    yield layers
    gpu.streams.synchronize()
    for layer in layers:
        layer.close()


@pytest.fixture(scope="module")
def filler(layers: list[GpuLayer]) -> Iterator[SlotBank]:
    """A second way into the slots of all layers, for another thread."""
    bank = SlotBank({layer.spec.index: layer.slots for layer in layers}, 24, layers[0].gpu.streams.copy)
    yield bank
    bank.close()


def swapped_adapters(layer: GpuLayer) -> list[list[Adapter | None]]:
    """What the slots hold with the one or the other adapter in the slot that is swapped."""
    fixed = random_adapter(layer.spec, 1, rank=5)
    others = [random_adapter(layer.spec, 2, rank=16), random_adapter(layer.spec, 3, rank=3, shared_outer=True)]
    return [[fixed, other, None] for other in others]


def items_of(layer: GpuLayer, choose: random.Random) -> list[Item]:
    """Replays of one layer over shapes, plans, routing inputs, with and without LoRA."""
    items = []
    for shape in SHAPES:
        for routing in RoutingInput:
            for plan in (None, *Plan):  # None: without LoRA
                tokens = choose.randint(max(shape // 2, 1), shape)
                batch = random_batch(layer.spec, tokens, seed=choose.randrange(10**6), drop=0.1)
                if plan is not None:
                    slots = torch.tensor([choose.choice([FIXED, SWAPPED, -1, 2]) for _ in range(tokens)])
                    batch = replace(batch, token_slots=slots.to(torch.int32))
                if routing is not RoutingInput.TOPK:
                    logits = torch.randn(tokens, layer.spec.num_experts)
                    sent = logits if routing is RoutingInput.LOGITS else None
                    batch = replace(batch, topk_ids=None, topk_weights=None, router_logits=sent)
                lora = plan is not None
                runnable = layer.runnable(shape, plan or Plan.FUSED, routing, lora=lora, captured=True)
                items.append(Item(layer, runnable, batch, []))
    return items


@contextmanager
def filling(device: Device, bank: SlotBank) -> Iterator[list[int]]:
    """A thread that fills the slot that nobody uses, again and again, on the copy stream; counts its rounds."""
    done, rounds, failures = Event(), [0], []
    parts = [
        [random_adapter(spec, seed, rank=rank).layers[spec.index] for spec in SPECS] for seed, rank in ((8, 20), (9, 7))
    ]
    adapters = [
        Adapter(path=Path("random"), rank=20, lora_alpha=8.0, scaling=1.0, layers=dict(enumerate(layers)))
        for layers in parts
    ]

    def fill() -> None:
        try:
            device.make_current()
            while not done.is_set():
                bank.install(FILLED, adapters[rounds[0] % 2])
                rounds[0] += 1
        except BaseException as failure:  # noqa: BLE001 (raised again by the test's thread)
            failures.append(failure)

    thread = Thread(target=fill)
    thread.start()
    try:
        yield rounds
    finally:
        done.set()
        thread.join()
        bank.remove(FILLED)
    if failures:
        raise failures[0]


def test_any_order_gives_what_eager_runs_gave(layers: list[GpuLayer], filler: SlotBank) -> None:
    choose, main = random.Random(1), layers[0].gpu.streams.main
    torch.manual_seed(1)
    items = [item for layer in layers for item in items_of(layer, choose)]
    held = [swapped_adapters(layer) for layer in layers]
    for which in range(2):
        for layer, adapters in zip(layers, held, strict=True):
            layer.install(adapters[which])
        for item in items:
            item.wanted.append(item.layer.eager(item.batch, item.runnable.variant.num_tokens))
    swapping = [item for item in items if not same_bits(*item.wanted)]
    assert len(swapping) > len(items) / 3, "the swap shows in the batches that use it"

    lanes, which = [Lane(layers) for _ in range(IN_FLIGHT)], 1
    with filling(layers[0].gpu.device, filler) as rounds:
        for _ in range(ROUNDS):
            if choose.random() < 0.3:
                which = 1 - which
                for layer, adapters in zip(layers, held, strict=True):
                    layer.install(adapters[which])
            chosen = choose.choices(items, k=IN_FLIGHT)
            for lane, item in zip(lanes, chosen, strict=True):
                lane.start(item)
            main.synchronize()
            for lane, item in zip(lanes, chosen, strict=True):
                assert same_bits(lane.result(item), item.wanted[which]), (
                    f"{item.runnable.variant} of layer {item.layer.spec.index} under {item.runnable.program.plan}"
                )
    assert rounds[0] > 1, "adapters were copied in meanwhile"
    for lane in lanes:
        lane.close()


def test_one_graph_serves_every_layer_of_its_geometry(layers: list[GpuLayer]) -> None:
    """A replay of the graph that one layer captured, with another layer's head, is that layer's forward."""
    first, second, _ = layers
    assert first.geometry == second.geometry
    for layer in (first, second):
        layer.install(swapped_adapters(layer)[0])
    batch = random_batch(SPEC, 21, seed=3, slots=[FIXED, -1, SWAPPED], drop=0.1)
    gate = replace(batch, topk_ids=None, topk_weights=None)
    for plan in Plan:
        for routing, each in ((RoutingInput.TOPK, batch), (RoutingInput.GATE, gate)):
            captured = first.runnable(24, plan, routing, captured=True)
            wanted = second.eager(each, 24)
            assert not same_bits(first.forward(captured, each), wanted)
            assert same_bits(second.forward(captured, each), wanted)


def test_a_slot_that_is_swapped_between_replays_is_swapped_whole(layers: list[GpuLayer]) -> None:
    layer = layers[2]
    batch = random_batch(layer.spec, MOST, seed=4, slots=[SWAPPED, FIXED])
    runnable = layer.runnable(MOST, Plan.TWO_STREAM_OVERLAP_DOWN, captured=True)
    wanted = []
    for adapters in swapped_adapters(layer):
        layer.install(adapters)
        wanted.append(layer.eager(batch))
    assert not same_bits(*wanted)
    for turn in range(20):
        layer.install(swapped_adapters(layer)[turn % 2])
        assert same_bits(layer.forward(runnable, batch), wanted[turn % 2])
