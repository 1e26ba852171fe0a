"""Layers on a real GPU for tests: one device for the session, layers and engines on it, and float64 truth from it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from moelet.graphs import mlp_launches
from moelet.graphs.adapters import AdapterSlots, SlotBank
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.driver import open_device
from moelet.graphs.engine import GraphEngine
from moelet.graphs.geometry import Geometry
from moelet.graphs.kernels import Kernels
from moelet.graphs.memory import DeviceBuffer
from moelet.graphs.options import GraphOptions
from moelet.graphs.pool import GraphPool, Runnable, Variant, arena_memory
from moelet.graphs.program import Plan
from moelet.graphs.residency import ResidentLayer, router_matrix
from moelet.graphs.staging import Staging, routing_input
from moelet.graphs.streams import Events, Streams
from moelet.graphs.transfer import Transfer
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import DeviceUnavailableError
from moelet.layer.oracle import layer_forward
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights
from oracle import torch_bf16_layer
from random_layers import model_of, random_weights, slice_weights

T = TypeVar("T")

GPU = "cuda"
"""The device that truth is worked out on."""


class Gpu:
    """The device of a test session, and what the layers on it share."""

    def __init__(self) -> None:
        self.device = open_device(0)
        self.streams, self.events = Streams(), Events()
        self.kernels = Kernels(self.device.arch, self.device.max_shared_memory)
        self._layers: dict[Any, GpuLayer] = {}

    def layer(
        self, spec: LayerSpec, *, max_tokens: int = 80, max_loras: int = 4, seed: int = 0, rank: int = 24
    ) -> "GpuLayer":
        """A layer with random weights of ``seed``; asking again gives the same one, whatever is in its slots."""
        key = (spec, max_tokens, max_loras, seed, rank)
        if key not in self._layers:
            weights = slice_weights(spec, random_weights(spec, seed))
            self._layers[key] = GpuLayer(self, spec, weights, max_tokens, max_loras, rank)
        return self._layers[key]

    def close(self) -> None:
        self.streams.synchronize()
        for owned in (*self._layers.values(), self.kernels, self.events, self.streams, self.device):
            owned.close()


class GpuLayer:
    """One layer on the GPU from which tests build any program: each shape, plan and routing, captured or eager.

    ``memory`` is what all its arenas lie in, filled with zeros at first; layers may share it as those of an engine do.
    """

    def __init__(
        self,
        gpu: Gpu,
        spec: LayerSpec,
        weights: LayerWeights,
        max_tokens: int,
        max_loras: int,
        rank: int,
        memory: DeviceBuffer | None = None,
    ) -> None:
        self.gpu, self.spec, self.weights = gpu, spec, weights
        router_fp32 = router_matrix(weights).dtype == torch.float32
        self.geometry = Geometry.of(spec, router_fp32=router_fp32, max_loras=max_loras, max_lora_rank=rank)
        self.resident = ResidentLayer(spec, self.geometry, weights, gpu.device.ordinal)
        self.slots = AdapterSlots(spec, self.geometry)
        self.slots.fill_args(self.resident.args)
        self.bank: SlotBank | None = None  # takes much pinned memory, which most kernels' tests have no use for
        self.adapters: list[Adapter | None] = [None] * max_loras
        self.memory = memory or arena_memory([self.geometry], [max_tokens], max_tokens)
        self.memory.fill(0, gpu.streams.main)
        self._owns_memory = memory is None
        self.pool = GraphPool(
            self.geometry,
            [max_tokens],
            max_tokens,
            kernels=gpu.kernels,
            streams=gpu.streams,
            events=gpu.events,
            sm_count=gpu.device.sm_count,
            memory=self.memory,
        )
        self.staging = Staging(self.geometry, max_tokens)
        self._built: dict[Any, Runnable] = {}

    def install(self, adapters: Sequence[Adapter | None]) -> None:
        """Let the first slots hold ``adapters`` and the others nothing."""
        wanted = [*adapters, *[None] * (len(self.adapters) - len(adapters))]
        if self.bank is None:
            self.bank = SlotBank({self.spec.index: self.slots}, self.geometry.max_lora_rank, self.gpu.streams.copy)
        for slot, adapter in enumerate(wanted):
            if adapter is self.adapters[slot]:
                continue
            if adapter is None:
                self.bank.remove(slot)
            else:
                self.bank.install(slot, adapter)
        self.adapters = wanted

    def runnable(
        self,
        num_tokens: int,
        plan: Plan = Plan.FUSED,
        routing: RoutingInput = RoutingInput.TOPK,
        *,
        lora: bool = True,
        captured: bool = False,
        delays: Mapping[str, int] | None = None,
        apart: bool = False,
    ) -> Runnable:
        """The program of one variant, built once."""
        patched = mlp_launches.PAIR_ROUNDS
        key = (num_tokens, plan, routing, lora, captured, tuple((delays or {}).items()), apart, patched)
        if key not in self._built:
            variant = Variant(num_tokens, routing, lora)
            self._built[key] = self.pool.build(variant, plan, captured=captured, delays=delays, apart=apart)
        return self._built[key]

    def transfer(self, runnable: Runnable, num_tokens: int) -> Transfer:
        """What a forward of ``num_tokens`` by ``runnable`` brings and takes."""
        return self.staging.transfer(runnable.variant, runnable.arena, num_tokens)

    def send(self, runnable: Runnable, batch: LayerBatch) -> None:
        """Bring a batch to where the program reads it."""
        transfer = self.transfer(runnable, batch.num_tokens)
        self.staging.send(batch, self.resident.head, transfer, self.gpu.streams.main)

    def forward(self, runnable: Runnable, batch: LayerBatch) -> Tensor:
        """One forward as the engine runs it, bf16 ``[T, H]``."""
        self.send(runnable, batch)
        runnable.run(self.gpu.streams.main)
        return self.staging.receive(self.transfer(runnable, batch.num_tokens), self.gpu.streams.main)

    def eager(self, batch: LayerBatch, num_tokens: int | None = None) -> Tensor:
        """The eager forward, in a shape of ``num_tokens`` (default: no padding)."""
        lora = batch.token_slots is not None
        shape = num_tokens or batch.num_tokens
        return self.forward(self.runnable(shape, routing=routing_input(batch), lora=lora), batch)

    def poison(self) -> None:
        """Fill every arena with NaN."""
        self.memory.poison(self.gpu.streams.main)

    def launch(self, runnable: Runnable, *labels: str) -> None:
        """Run single kernels of a program, by label, one after the other."""
        self.gpu.streams.synchronize()
        for label in labels:
            [launch] = [one for one in runnable.program.launches if one.label == label]
            launch.launch()
            launch.stream.synchronize()

    def close(self) -> None:
        for runnable in self._built.values():
            if runnable.graph is not None:
                runnable.graph.destroy()
        self.pool.close()
        if self._owns_memory:
            self.memory.close()
        for owned in (self.staging, self.bank or self.slots, self.resident):
            owned.close()


_GPU = pytest.StashKey[Gpu]()


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """The GPU, one for all test files; skips where there is none."""
    stash = request.config.stash
    if _GPU not in stash:
        try:
            stash[_GPU] = Gpu()
        except DeviceUnavailableError as error:
            pytest.skip(str(error))
        request.config.add_cleanup(stash[_GPU].close)
    return stash[_GPU]


@contextmanager
def opened_engine(spec: LayerSpec, weights: LayerWeights, **options: Any) -> Iterator[GraphEngine]:
    """An engine of one layer, started, and closed at the end."""
    engine = GraphEngine(model_of(spec), GraphOptions(**options))
    try:
        engine.add_layer(spec.index, weights)
        engine.start()
        yield engine
    finally:
        engine.close()


class Expected(NamedTuple):
    """What the tolerance rule compares with: float64 truth and torch in bf16, ``[T, H]`` on the host."""

    truth: Tensor
    baseline: Tensor


def expected(
    spec: LayerSpec, weights: LayerWeights, batch: LayerBatch, adapters: Sequence[Adapter | None] = ()
) -> Expected:
    """Truth and baseline of a batch, worked out on the GPU."""
    slots = torch.full((batch.num_tokens,), -1, dtype=torch.int32) if batch.token_slots is None else batch.token_slots
    there = [moved(part, GPU) for part in (weights, replace(batch, token_slots=slots), list(adapters))]
    with torch.device(GPU), exact_sums():
        truth = layer_forward(spec, *there)
        baseline = torch_bf16_layer(spec, *there)
    return Expected(truth.cpu(), baseline.cpu())


@contextmanager
def exact_sums() -> Iterator[None]:
    """cuBLAS may not add partial sums up in bf16: that would make the baseline worse, and the rule easier."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


def moved(value: T, device: str) -> T:
    """``value`` with every tensor inside on ``device``: of dataclasses, mappings and lists."""
    result: Any = value
    if isinstance(value, Tensor):
        result = value.to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(getattr(value, f.name), device) for f in fields(value) if f.init}
        result = replace(value, **parts)
    elif isinstance(value, Mapping):
        result = {key: moved(item, device) for key, item in value.items()}
    elif isinstance(value, list):
        result = [moved(item, device) for item in value]
    return result


def big_weights(spec: LayerSpec, seed: int = 0) -> LayerWeights:
    """Random weights made on the GPU; what an engine copies from host memory lies there."""
    weights = random_weights(spec, seed, device=GPU)
    small = ("router", "correction_bias", "shared_gate")
    return replace(weights, **{name: moved(getattr(weights, name), "cpu") for name in small})


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two bf16 tensors are the same bit for bit, signs of zero and NaNs included."""
    assert first.dtype == second.dtype == torch.bfloat16
    return first.shape == second.shape and torch.equal(first.view(torch.int16), second.view(torch.int16))


def summed_by_hand(down: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """The finalize in torch: ``down`` ``[rows, H]`` summed in choice order by fused multiply-adds, then bf16.

    A product of two fp32 numbers is exact in float64, so rounding the float64 sum to fp32 rounds as the hardware does.
    """
    total = torch.zeros(len(places), down.shape[1])
    for choice in range(places.shape[1]):
        chosen = (places[:, choice] >= 0).nonzero().flatten()
        product = weights[chosen, choice, None].double() * down[places[chosen, choice].long()].double()
        total[chosen] = (product + total[chosen].double()).float()
    return total.bfloat16()
