"""The way of forwards onto the GPU and back over the fake driver: no output is written over before it is taken."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_driver import FakeDriver, ok

pytest.importorskip("cuda.bindings.driver")

from moelet.graphs import staging as staging_module
from moelet.graphs.arena import Arena, shared_memory
from moelet.graphs.arrival import Arrival
from moelet.graphs.buffers import FORWARD_ARGS, LAYER_ARGS, InputLayout, RoutingInput, plan_buffers
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.geometry import Geometry
from moelet.graphs.pool import Variant
from moelet.graphs.staging import Staging
from moelet.graphs.streams import Streams
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from moelet.layer.spec import LayerSpec

TOKENS = 4
HEAD = bytes(range(1, LAYER_ARGS.itemsize - FORWARD_ARGS.size + 1))
ELSEWHERE = 1 << 50
"""How far the device's addresses of host memory are from the host's own."""
OUTBOUND = ["cuMemcpyDtoDAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync"]


class MappingDriver(FakeDriver):
    """The fake driver, but that host memory has another address on the device."""

    def cuMemHostGetDevicePointer(self, address, flags):
        return ok(driver.CUdeviceptr(address + ELSEWHERE))


@dataclass
class Way:
    """A staging, and an arena whose forwards give what a test says; ``written`` are the outputs that kernels wrote."""

    geometry: Geometry
    staging: Staging
    arena: Arena
    streams: Streams
    fake: FakeDriver
    keeps: bool
    written: list[int] = field(default_factory=list)

    def begin(self, value: int, *, beside: bool = False, direct: bool = True) -> Arrival:
        """A forward whose output is ``value`` throughout."""
        batch = LayerBatch(layer=0, hidden_states=self.filled(0, self.geometry.hidden_size))
        transfer = self.staging.transfer(Variant(TOKENS, RoutingInput.GATE, lora=False), self.arena, TOKENS)
        self.staging.send(batch, HEAD, transfer, self.streams.main, beside=beside, direct=direct)
        self.compute(value)
        return self.staging.begin_receive(transfer, self.streams.main)

    def compute(self, value: int) -> None:
        """What the last kernel does."""
        address = int(self.head["output"])
        if address:
            self.written.append(address)
        output = self.filled(value, self.geometry.output_stride)
        target = address - ELSEWHERE if address else self.arena.pointer("output")
        ctypes.memmove(target, output.data_ptr(), output.nbytes)

    @property
    def head(self) -> np.void:
        """What the forward that was sent last finds in front of its input."""
        sent = ctypes.string_at(self.arena.pointer("input"), LAYER_ARGS.itemsize)
        head: np.void = np.frombuffer(sent, LAYER_ARGS)[0]
        return head

    def is_that_of(self, output: Tensor, value: int) -> bool:
        """Whether ``output`` is that of ``begin(value)``."""
        return output.equal(self.filled(value, self.geometry.hidden_size))

    @staticmethod
    def filled(value: int, width: int) -> Tensor:
        return torch.full((TOKENS, width), float(value), dtype=torch.bfloat16)


@pytest.fixture(params=["copied", "kept", "padded", "detour"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    fake = MappingDriver().install(monkeypatch)
    hidden_size = 96 if request.param == "padded" else 128
    spec = LayerSpec(index=0, hidden_size=hidden_size, intermediate_size=64, num_experts=4, top_k=2)
    geometry = Geometry.of(spec, router_fp32=False, max_loras=0, max_lora_rank=0)
    plan = plan_buffers(geometry, TOKENS, lora=False)
    memory, streams = shared_memory([plan]), Streams()
    kept = 0 if request.param == "copied" else TOKENS
    through = streams if request.param == "detour" else None
    staging = Staging(geometry, TOKENS, kept_tokens=kept, depth=2, streams=through)
    keeps = request.param in ("kept", "detour")
    assert ("cuMemHostRegister" in fake.calls) == keeps
    yield Way(geometry, staging, Arena(plan, memory), streams, fake, keeps)
    for owned in (staging, memory, streams):
        owned.close()
    assert fake.allocations == {}
    assert fake.events == {}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "not direct"])
def test_forwards_behind_one_that_is_not_waited_for_leave_its_output_alone(way: Way, direct: bool) -> None:
    ahead = way.begin(1, direct=direct)
    for part in range(2, 6):
        assert way.is_that_of(way.begin(part, beside=True, direct=direct).result(), part)
    assert way.is_that_of(ahead.result(), 1)
    assert bool(way.written) == (way.keeps and direct)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_forwards_that_were_sent_and_no_more_leave_one_under_way_alone(way: Way, lost: int) -> None:
    """They failed to launch, or stay unfinalized."""
    ahead = way.begin(1)
    transfer = way.staging.transfer(Variant(TOKENS, RoutingInput.GATE, lora=False), way.arena, TOKENS)
    batch = LayerBatch(layer=0, hidden_states=way.filled(0, way.geometry.hidden_size))
    for number in range(lost):
        way.staging.send(batch, HEAD, transfer, way.streams.main, beside=True, direct=number % 2 == 0)
    behind = way.begin(2, beside=True)
    assert way.is_that_of(ahead.result(), 1)
    assert way.is_that_of(behind.result(), 2)


def test_a_chain_of_two_under_way(way: Way) -> None:
    ahead = way.begin(0)
    outputs = []
    for number in range(1, 40):
        behind = way.begin(number, beside=True, direct=number % 3 > 0)
        outputs.append(ahead.result())
        ahead = behind
    outputs.append(ahead.result())
    assert all(way.is_that_of(output, number) for number, output in enumerate(outputs))
    if way.keeps:
        assert len(set(way.written)) == len(way.written) < way.staging.kept_blocks, "others were copied: all are held"


def test_what_a_kernel_writes_to_where_it_is_kept_is_not_copied(way: Way) -> None:
    for beside, direct in ((False, True), (True, True), (False, False), (True, False)):
        way.fake.calls.clear()
        way.begin(3, beside=beside, direct=direct).result()
        calls = way.fake.calls
        out = calls[calls.index("cuMemcpyHtoDAsync") + 1 : calls.index("cuEventSynchronize")]
        crossed = beside and way.staging._detour is not None
        out = out[3:] if crossed else out
        copied = OUTBOUND if crossed else ["cuMemcpyDtoHAsync"]
        assert out == [*([] if way.keeps and direct else copied), "cuEventRecord"]


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
def test_an_output_too_large_to_be_written_by_a_kernel_is_copied(
    way: Way, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a limit for forwards beside others, and one for those alone."""
    num_bytes = TOKENS * way.geometry.output_stride * 2
    for most, direct in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(staging_module, f"DIRECT_BYTES_{'BESIDE' if beside else 'ALONE'}", most)
        for now in (True, False):
            way.written.clear()
            assert way.is_that_of(way.begin(5, beside=now).result(), 5)
            assert bool(way.written) == (way.keeps and (direct or now is not beside))


def test_the_memory_is_taken_until_the_output_is(way: Way) -> None:
    ahead = way.begin(1)
    assert ahead.under_way
    output = ahead.result()
    assert not ahead.under_way
    assert way.is_that_of(way.begin(2).result(), 2)
    assert way.is_that_of(output, 1)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "not direct"])
def test_memory_that_may_still_be_written_is_not_used_again(
    way: Way, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            way.begin(1, direct=direct).result()
    outputs = []
    for value in range(2, 6):
        gc.collect()
        outputs.append(way.begin(value, direct=direct).result())
    assert all(block is None or block is not taken[0] for block in taken[1:])
    assert all(way.is_that_of(output, value) for value, output in enumerate(outputs, 2))


@pytest.mark.parametrize("name", [*OUTBOUND, "cuMemcpyHtoDAsync", "cuEventSynchronize"])
@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "not direct"])
def test_forwards_that_fail_leave_one_under_way_alone(
    way: Way, name: str, failures: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they do; and the next is itself again."""

    def fails(*_: object) -> tuple[object]:
        return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)

    ahead = way.begin(1, direct=direct)
    with monkeypatch.context() as patched:
        patched.setattr(driver, name, fails)
        for value in range(2, 2 + failures):
            with suppress(DriverError):  # not all make every call
                way.begin(value, beside=True, direct=direct).result()
    behind = way.begin(9, beside=True, direct=direct)
    assert way.is_that_of(ahead.result(), 1)
    assert way.is_that_of(behind.result(), 9)


@pytest.mark.parametrize("fails", [False, True], ids=["taken", "waited for in vain"])
def test_an_output_is_taken_once(way: Way, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later its memory may be another's, or be written at any time."""
    forward = way.begin(1)
    with monkeypatch.context() as patched, suppress(DriverError):
        if fails:
            patched.setattr(driver, "cuEventSynchronize", lambda _: (driver.CUresult.CUDA_ERROR_UNKNOWN,))
        forward.result()
    with pytest.raises(EngineError, match="asked for once"):
        forward.result()
    outputs = [way.begin(value).result() for value in range(20)]
    assert all(way.is_that_of(output, value) for value, output in enumerate(outputs))


def test_a_block_of_a_forward_that_was_not_launched_is_not_used_again(way: Way) -> None:
    """Whether some of it was launched is not known: it may be written yet."""
    transfer = way.staging.transfer(Variant(TOKENS, RoutingInput.GATE, lora=False), way.arena, TOKENS)
    batch = LayerBatch(layer=0, hidden_states=way.filled(0, way.geometry.hidden_size))
    way.staging.send(batch, HEAD, transfer, way.streams.main, direct=True)
    lost = int(way.head["output"])
    gc.collect()
    outputs = [way.begin(value).result() for value in range(20)]
    assert all(way.is_that_of(output, value) for value, output in enumerate(outputs))
    assert lost not in way.written


def test_a_forward_is_told_its_layer_its_tokens_and_where_its_output_goes(way: Way) -> None:
    way.begin(1, direct=False).result()
    head = way.head
    assert head.tobytes()[: len(HEAD)] == HEAD
    assert head["num_tokens"] == TOKENS
    assert head["output"] == 0, "the arena's own"
    way.begin(1).result()
    output = int(way.head["output"])
    assert (output > ELSEWHERE) == way.keeps
    assert output % 4096 == 0, "kernels write whole lines"


def test_slots_are_sent_to_kernels_that_look_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver().install(monkeypatch)
    spec = LayerSpec(index=0, hidden_size=96, intermediate_size=64, num_experts=4, top_k=2)
    geometry = Geometry.of(spec, router_fp32=False, max_loras=2, max_lora_rank=8)
    plan = plan_buffers(geometry, 8, lora=True)
    streams, memory, staging = Streams(), shared_memory([plan]), Staging(geometry, 8)
    arena, tokens, hidden = Arena(plan, memory), 3, torch.randn(3, 192).bfloat16()[:, ::2]
    routed = {"topk_ids": torch.arange(6, dtype=torch.int32).view(2, 3).T, "topk_weights": torch.rand(3, 2)}
    variant = Variant(8, RoutingInput.TOPK, lora=True)
    layout = InputLayout(geometry, 8, RoutingInput.TOPK)
    for slots in (torch.tensor([1, -1, 0], dtype=torch.int32), None):
        batch = LayerBatch(layer=0, hidden_states=hidden, token_slots=slots, **routed)
        staging.send(batch, HEAD, staging.transfer(variant, arena, tokens), streams.main)
        block = arena.read("input").numpy()
        found = {
            name: block[layout.fields[name].offset :][: layout.bytes_of(name, tokens)].tobytes()
            for name in layout.fields
        }
        padded = torch.zeros(3, geometry.hidden_stride, dtype=torch.bfloat16)
        padded[:, :96] = hidden
        assert found["hidden_states"] == padded.view(torch.int16).numpy().tobytes()
        assert found["token_slots"] == (np.full(3, -1, np.int32) if slots is None else slots.numpy()).tobytes()
        for name, sent in routed.items():
            assert found[name] == sent.contiguous().numpy().tobytes()
    names = [piece.name for piece in staging.transfer(Variant(8, RoutingInput.TOPK, lora=False), arena, 3).pieces]
    assert names == ["topk_ids", "topk_weights"]
    for owned in (staging, memory, streams):
        owned.close()
    assert fake.allocations == {}
