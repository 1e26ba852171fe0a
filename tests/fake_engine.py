"""The GPU engine over the fake driver, with what each launch of a graph found in front of its input."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fake_driver import ok
from fake_layer import LayerDriver, LoadedKernels
from moelet.graphs import engine as engine_module
from moelet.graphs.buffers import LAYER_ARGS
from moelet.graphs.driver import driver
from moelet.graphs.engine import GraphEngine
from moelet.graphs.options import GraphOptions
from moelet.graphs.program import Plan
from moelet.graphs.staging import routing_input
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec
from random_layers import model_of, random_batch, random_weights

SPEC = LayerSpec(index=0, hidden_size=128, intermediate_size=64, num_experts=4, top_k=2)
OPTIONS: dict[str, Any] = {
    "max_loras": 2,
    "max_lora_rank": 8,
    "decode_shapes": (4, 8),
    "max_decode_tokens": 8,
    "max_eager_tokens": 16,
    "plan": Plan.SINGLE_STREAM,
}
"""Under this plan a graph with adapters has more kernels than one without."""
ELSEWHERE = 1 << 50
"""How far the device's addresses of host memory are from the host's own."""


class Fetched(NamedTuple):
    """Where a fetch took its input from, by the device's addresses, and how many bytes of each."""

    first: int
    rest: int
    first_bytes: int
    rest_bytes: int


class BusDriver(LayerDriver):
    """The fake driver where host memory has another address on the device; ``fetch`` is the kernel of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.fetch = 0

    def cuMemHostGetDevicePointer(self, address: Any, flags: Any) -> Any:
        return ok(driver.CUdeviceptr(address + ELSEWHERE))

    def cuModuleGetFunction(self, module: Any, name: Any) -> Any:
        code, function = super().cuModuleGetFunction(module, name)
        if name == b"fetch":
            self.fetch = int(function)
        return code, function

    def fetched(self) -> tuple[int, int, int, int, int]:
        """Of the fetch that was launched last: both sources and the target, lanes of the first source and of both."""
        first, rest, target, split, lanes = struct.unpack("<QQQii", self.launches[-1][1])
        return first, rest, target, split, lanes


class Driver(BusDriver):
    """The fake driver, with what each launch of a graph found: the head, and how many kernels the graph has; and what
    came over the bus, by ``fetches`` and ``copies`` (host address and bytes).

    Forwards that are not captured launch kernels one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input = self.end = 0
        self.fetches: list[Fetched] = []
        self.copies: list[tuple[int, int]] = []
        self.heads: list[np.void] = []
        self.kernels: dict[int, int] = {}
        self.launched: list[int] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> Any:
        result = super().cuLaunchKernelEx(config, function, parameters, extra)
        if int(function) == self.fetch:
            first, rest, self.input, split, lanes = self.fetched()
            assert config.gridDimX * config.blockDimX >= lanes
            fetched = Fetched(first, rest, 16 * split, 16 * (lanes - split))
            ctypes.memmove(self.input, first - ELSEWHERE, fetched.first_bytes)
            ctypes.memmove(self.input + fetched.first_bytes, rest - ELSEWHERE, fetched.rest_bytes)
            self.fetches.append(fetched)
        return result

    def cuMemcpyHtoDAsync(self, target: Any, source: Any, num_bytes: int, stream: Any) -> Any:
        if int(target) != self.end:  # else it goes on where the last one ended
            self.input = int(target)
        self.end = int(target) + num_bytes
        self.copies.append((int(source), num_bytes))
        return super().cuMemcpyHtoDAsync(target, source, num_bytes, stream)

    def cuGraphInstantiate(self, graph: Any, flags: Any) -> Any:
        executable = self.handle()
        self.kernels[executable] = self.nodes.count("KERNEL")
        return ok(driver.CUgraphExec(executable))

    def cuGraphLaunch(self, executable: Any, stream: Any) -> Any:
        self.launched.append(self.kernels[int(executable)])
        self.heads.append(np.frombuffer(ctypes.string_at(self.input, LAYER_ARGS.itemsize), LAYER_ARGS)[0])
        return super().cuGraphLaunch(executable, stream)


@dataclass
class Opened:
    """A started engine, and its driver."""

    engine: GraphEngine
    driver: Driver

    def calls(self, **changes: Any) -> list[str]:
        """What beginning a batch of four tokens, less what ``changes``, asks of the driver."""
        batch = random_batch(SPEC, 4)
        self.driver.calls.clear()
        self.engine.begin(replace(batch, **changes)).result()
        return self.driver.calls

    def came(self, batch: LayerBatch) -> bool:
        """Whether the hidden states that came last are those of ``batch``."""
        transfer = self.engine._served[0].way(batch.num_tokens, routing_input(batch), False).transfer
        sent = batch.hidden_states.contiguous().view(torch.int16).numpy().tobytes()
        return ctypes.string_at(self.driver.input + transfer.hidden.offset, len(sent)) == sent


class Locked:
    """Page-locked memory for hidden states, which lives as long as a tensor of it."""

    def __init__(self, num_bytes: int = 64 * 2 * SPEC.hidden_size) -> None:
        storage = np.zeros(num_bytes + 4096, np.uint8)
        start = -storage.ctypes.data % 4096
        self.storage, self.bytes = storage, storage[start : start + num_bytes]
        self.address = self.bytes.ctypes.data
        driver.cuMemHostRegister(self.address, num_bytes, 0)

    def holding(self, batch: LayerBatch, offset: int = 0) -> LayerBatch:
        """``batch`` with hidden states ``offset`` bytes into this memory."""
        hidden = batch.hidden_states
        there = torch.from_numpy(self.bytes[offset : offset + hidden.nbytes].view(np.int16)).view(torch.bfloat16)
        return replace(batch, hidden_states=there.view(hidden.shape).copy_(hidden))

    def forget(self) -> None:
        driver.cuMemHostUnregister(self.address)


@contextmanager
def started(monkeypatch: pytest.MonkeyPatch, spec: LayerSpec, fake: BusDriver) -> Iterator[GraphEngine]:
    """An engine of one layer over ``fake``, which leaves nothing behind."""
    monkeypatch.setattr(engine_module, "Kernels", LoadedKernels)
    fake.install(monkeypatch)
    engine = GraphEngine(model_of(spec), GraphOptions(**OPTIONS))
    engine.add_layer(0, random_weights(spec))
    engine.start()
    locked = set(fake.locked)
    yield engine
    engine.close()
    assert fake.allocations == {}
    assert not locked & set(fake.locked)
    assert fake.events == {}


@contextmanager
def opened_over(monkeypatch: pytest.MonkeyPatch, spec: LayerSpec) -> Iterator[Opened]:
    """The same over a ``Driver``."""
    fake = Driver()
    with started(monkeypatch, spec, fake) as engine:
        yield Opened(engine, fake)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with opened_over(monkeypatch, SPEC) as opened:
        yield opened
