"""Whether memory is page-locked, as the fake driver says, and memory that the engine lends, which always is."""

# ruff: noqa: ARG001, F401, F811 (fixtures are imported, and asked for by name)

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from fake_driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")

from fake_engine import ELSEWHERE, SPEC, Locked, Opened, opened
from fake_host_memory import HOST
from moelet.graphs import input_memory, staging
from moelet.graphs.driver import driver
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer
from moelet.graphs.page_locked import PageLocked
from random_layers import random_batch

ROW = SPEC.hidden_size * 2
ASK = "cuPointerGetAttributes"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def test_all_of_the_bytes_have_to_be_locked(fake: FakeDriver) -> None:
    pinned, asked, device = PinnedBuffer(4096), PageLocked(), DeviceBuffer(64)
    assert asked.device_address(device.pointer, 64) == 0, "it is not the host's"
    assert asked.device_address(pinned.pointer, 4096) == pinned.pointer
    assert asked.device_address(pinned.pointer + 100, 3996) == pinned.pointer + 100
    assert asked.device_address(pinned.pointer + 100, 3997) == 0
    assert asked.device_address(pinned.pointer - 1, 2) == 0
    freed = pinned.pointer
    pinned.close()
    assert asked.device_address(freed, 1) == 0


def test_parts_that_the_device_sees_apart_are_not_one(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that were locked apart lie behind each other on the host, and on the device elsewhere."""
    asked, locked = PageLocked(), Locked(2 * 4096)
    locked.forget()
    for start in (0, 4096):
        driver.cuMemHostRegister(locked.address + start, 4096, 0)

    def mapped(address: int, _flags: int) -> tuple[object, ...]:
        return driver.CUresult.CUDA_SUCCESS, driver.CUdeviceptr(address + ELSEWHERE * (1 + (address >= second)))

    second = locked.address + 4096
    monkeypatch.setattr(fake, "cuMemHostGetDevicePointer", mapped)
    assert asked.device_address(locked.address, 4096) == locked.address + ELSEWHERE
    assert asked.device_address(second, 4096) == second + 2 * ELSEWHERE
    assert asked.device_address(locked.address, 4097) == 0


def test_a_driver_that_cannot_say_or_fails_to(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = PinnedBuffer(64)
    code = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with monkeypatch.context() as patched:
        patched.setattr(fake, "cuPointerGetAttributes", lambda *_: int(code))
        assert PageLocked().device_address(pinned.pointer, 64) == 0
    fake.without = frozenset({ASK.encode()})
    assert PageLocked().device_address(pinned.pointer, 64) == 0


def test_an_address_that_is_not_told_is_not_that_of_the_question_before(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may know that memory is locked and still have no address of it in this context."""
    reached, unreached = PinnedBuffer(64), PinnedBuffer(64)
    tell = fake.cuPointerGetAttributes

    def type_alone(count: int, attributes: int, data: int, address: int) -> int:
        if address == reached.pointer:
            return tell(count, attributes, data, address)
        ctypes.c_uint.from_address(ctypes.c_void_p.from_address(data).value or 0).value = HOST
        return 0

    monkeypatch.setattr(fake, ASK, type_alone)
    asked = PageLocked()
    assert asked.device_address(reached.pointer, 1) == reached.pointer
    assert asked.device_address(unreached.pointer, 1) == 0


def test_memory_that_the_engine_lends_is_read_where_it_is(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ASKED_BYTES", 1)
    batch = random_batch(SPEC, 4)
    octets = opened.engine.input_memory(48 + 4 * ROW)
    assert octets is not None
    assert len(octets) == 48 + 4 * ROW
    hidden = torch.frombuffer(octets[48:], dtype=torch.bfloat16).view(4, -1).copy_(batch.hidden_states)
    opened.engine.begin(replace(batch, hidden_states=hidden)).result()
    assert opened.came(batch)
    [fetched] = opened.driver.fetches
    assert fetched.rest == hidden.data_ptr() + ELSEWHERE


def test_so_much_is_lent_and_no_more(opened: Opened) -> None:
    """A block holds the largest batch however it is routed; one is lent again once nobody looks at it."""
    most = opened.engine.batch_tokens * (ROW + 8 * SPEC.top_k)
    assert most == opened.engine.batch_tokens * (ROW + 4 * SPEC.num_experts), "both ways of routing are as large here"
    lent = [opened.engine.input_memory(most + input_memory.BESIDE) for _ in range(input_memory.BLOCKS)]
    assert all(octets is not None for octets in lent)
    assert len({address_of(octets) for octets in lent}) == len(lent)
    assert all(address_of(octets) % 64 == 0 for octets in lent)
    assert opened.engine.input_memory(1) is None
    part = lent.pop()[5:9]
    assert opened.engine.input_memory(1) is None
    del part
    assert opened.engine.input_memory(most + input_memory.BESIDE + 1) is None
    assert opened.engine.input_memory(1) is not None


def address_of(octets: memoryview) -> int:
    return np.frombuffer(octets, np.uint8).ctypes.data
