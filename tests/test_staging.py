"""The way of forwards onto the GPU and back over the fake driver: no output is written over before it is taken."""

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")

from moelet.graphs.arena import Arena, shared_memory
from moelet.graphs.buffers import LAYER_ARGS, RoutingInput, plan_buffers
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.geometry import Geometry
from moelet.graphs.pool import Variant
from moelet.graphs.staging import Arrival, Staging
from moelet.graphs.streams import Streams
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec

TOKENS = 4


@dataclass
class Way:
    """A staging, and an arena whose output is what a test says."""

    geometry: Geometry
    staging: Staging
    arena: Arena
    streams: Streams

    def begin(self, value: int, *, beside: bool = False) -> Arrival:
        """A forward whose output is ``value`` throughout."""
        batch = LayerBatch(layer=0, hidden_states=self.filled(0, self.geometry.hidden_size))
        head, variant = np.zeros((), dtype=LAYER_ARGS), Variant(TOKENS, RoutingInput.GATE, lora=False)
        self.staging.send(batch, head, variant, self.arena, self.streams.main, beside=beside)
        output = self.filled(value, self.geometry.output_stride)
        ctypes.memmove(self.arena.pointer("output"), output.data_ptr(), output.nbytes)
        return self.staging.begin_receive(TOKENS, self.arena, self.streams.main)

    def is_that_of(self, output: Tensor, value: int) -> bool:
        """Whether ``output`` is that of ``begin(value)``."""
        return output.equal(self.filled(value, self.geometry.hidden_size))

    @staticmethod
    def filled(value: int, width: int) -> Tensor:
        return torch.full((TOKENS, width), float(value), dtype=torch.bfloat16)


@pytest.fixture(params=["copied", "kept", "padded", "detour"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    fake = FakeDriver().install(monkeypatch)
    hidden_size = 96 if request.param == "padded" else 128
    spec = LayerSpec(index=0, hidden_size=hidden_size, intermediate_size=64, num_experts=4, top_k=2)
    geometry = Geometry.of(spec, router_fp32=False, max_loras=0, max_lora_rank=0)
    plan = plan_buffers(geometry, TOKENS, lora=False)
    memory, streams = shared_memory([plan]), Streams()
    kept = 0 if request.param == "copied" else TOKENS
    through = streams if request.param == "detour" else None
    staging = Staging(geometry, TOKENS, kept_tokens=kept, depth=2, streams=through)
    assert ("cuMemHostRegister" in fake.calls) == (request.param in ("kept", "detour"))
    yield Way(geometry, staging, Arena(plan, memory), streams)
    for owned in (staging, memory, streams):
        owned.close()
    assert fake.allocations == {}
    assert fake.events == {}


def test_forwards_behind_one_that_is_not_waited_for_leave_its_output_alone(way: Way) -> None:
    ahead = way.begin(1)
    for part in range(2, 6):
        assert way.is_that_of(way.begin(part, beside=True).result(), part)
    assert way.is_that_of(ahead.result(), 1)


def test_a_chain_of_two_under_way(way: Way) -> None:
    ahead = way.begin(0)
    outputs = []
    for number in range(1, 40):
        behind = way.begin(number, beside=True)
        outputs.append(ahead.result())
        ahead = behind
    outputs.append(ahead.result())
    assert all(way.is_that_of(output, number) for number, output in enumerate(outputs))


def test_the_memory_is_taken_until_the_output_is(way: Way) -> None:
    ahead = way.begin(1)
    assert ahead.under_way
    output = ahead.result()
    assert not ahead.under_way
    assert way.is_that_of(way.begin(2).result(), 2)
    assert way.is_that_of(output, 1)


def test_memory_that_may_still_be_written_is_not_used_again(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def cuEventSynchronize(_event: object) -> tuple[object]:
        return (driver.CUresult.CUDA_ERROR_UNKNOWN,)

    taken: list[object] = []
    take = way.staging._kept.take

    def noted(num_bytes: int) -> object:
        taken.append(take(num_bytes))
        return taken[-1]

    monkeypatch.setattr(way.staging._kept, "take", noted)
    with monkeypatch.context() as patched:
        patched.setattr(driver, "cuEventSynchronize", cuEventSynchronize)
        with pytest.raises(DriverError):
            way.begin(1).result()
    outputs = []
    for value in range(2, 6):
        gc.collect()
        outputs.append(way.begin(value).result())
    assert all(block is None or block is not taken[0] for block in taken[1:])
    assert all(way.is_that_of(output, value) for value, output in enumerate(outputs, 2))
