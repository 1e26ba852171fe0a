"""Hidden states in page-locked memory on a real GPU: the bits of copied ones, whatever becomes of the memory after."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from decode_cases import REAL, batch_of, some_adapters
from gpu_engines import Gpu, gpu, opened_engine, same_bits
from moelet.graphs import staging as staging_module
from moelet.graphs.driver import call, driver
from moelet.graphs.engine import GraphEngine
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer
from moelet.graphs.page_locked import PageLocked
from moelet.layer.engine import LayerBatch
from random_layers import random_weights

pytestmark = pytest.mark.gpu

TOKENS = (1, 7, 8, 16, 33, 64, 130, 256, 257, 400)
MOST = max(TOKENS)
ELEMENTS = MOST * REAL.hidden_size


@pytest.fixture(scope="module")
def engine() -> Iterator[GraphEngine]:
    with opened_engine(REAL, random_weights(REAL), max_loras=4, max_lora_rank=32, max_eager_tokens=512) as engine:
        for slot, adapter in enumerate(some_adapters(REAL)):
            if adapter is not None:
                engine.install_adapter(slot, adapter)
        yield engine


@pytest.fixture(scope="module")
def wanted(engine: GraphEngine) -> dict[tuple[int, bool], tuple[LayerBatch, Tensor]]:
    """Batches by tokens and whether they have adapters, and their outputs from memory that is copied."""
    found = {}
    for tokens, lora in product(TOKENS, (False, True)):
        batch = batch_of(REAL, tokens, lora=lora)
        found[tokens, lora] = batch, engine.forward(batch).clone()
    return found


def mapped() -> int:
    """The flags of memory that every context reaches."""
    return int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)


@contextmanager
def registered() -> Iterator[Tensor]:
    """Memory of numpy's that was locked in place."""
    storage = np.zeros(ELEMENTS + 4096, np.int16)
    start = -storage.ctypes.data % 4096 // 2
    locked = storage[start : start + ELEMENTS + 8]
    call(driver.cuMemHostRegister, locked.ctypes.data, locked.nbytes, mapped())
    yield torch.from_numpy(locked).view(torch.bfloat16)
    call(driver.cuMemHostUnregister, locked.ctypes.data)


@contextmanager
def pinned() -> Iterator[Tensor]:
    """Memory of torch's."""
    yield torch.zeros(ELEMENTS + 8, dtype=torch.bfloat16).pin_memory()


@contextmanager
def pageable() -> Iterator[Tensor]:
    """Memory that nobody locked."""
    yield torch.zeros(ELEMENTS + 8, dtype=torch.bfloat16)


MEMORIES = {"registered": registered, "pinned": pinned, "pageable": pageable}


def placed(batch: LayerBatch, memory: Tensor, start: int) -> LayerBatch:
    """``batch`` with hidden states ``start`` elements into ``memory``."""
    hidden = batch.hidden_states
    return replace(batch, hidden_states=memory[start : start + hidden.numel()].view(hidden.shape).copy_(hidden))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each question whether memory is page-locked, the answer."""
    answers: list[bool] = []
    ask = PageLocked.device_address

    def noted(self: PageLocked, address: int, num_bytes: int) -> int:
        answers.append((found := ask(self, address, num_bytes)) != 0)
        return found

    monkeypatch.setattr(PageLocked, "device_address", noted)
    return answers


@pytest.mark.parametrize("least", [1, staging_module.ASKED_BYTES], ids=["all asked of", "as served"])
@pytest.mark.parametrize("start", [0, 8, 1], ids=["at its start", "aligned", "misaligned"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_bits_are_those_of_copied_ones(
    engine: GraphEngine,
    wanted: dict[tuple[int, bool], tuple[LayerBatch, Tensor]],
    reached: list[bool],
    memory: str,
    start: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is written over as soon as each output is there."""
    monkeypatch.setattr(staging_module, "ASKED_BYTES", least)
    with MEMORIES[memory]() as room:
        for batch, expected in wanted.values():
            output = engine.begin(placed(batch, room, start)).result()
            room.fill_(torch.nan)
            assert same_bits(output, expected), batch.num_tokens
    asked = sum(batch.hidden_states.nbytes >= least for batch, _ in wanted.values()) if start % 8 == 0 else 0
    assert reached == [memory != "pageable"] * asked


@pytest.mark.parametrize("fetched", [0, 1 << 30], ids=["copied", "fetched"])
def test_the_bits_are_the_same_by_copies_and_by_the_kernel(
    engine: GraphEngine,
    wanted: dict[tuple[int, bool], tuple[LayerBatch, Tensor]],
    fetched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_module, "FETCHED_BYTES", fetched)
    for served in engine._served.values():
        served.way.cache_clear()  # type: ignore[attr-defined]
    with pinned() as room:
        for batch, expected in wanted.values():
            assert same_bits(engine.begin(placed(batch, room, 0)).result(), expected), batch.num_tokens
    for served in engine._served.values():
        served.way.cache_clear()  # type: ignore[attr-defined]


def test_forwards_behind_each_other_read_their_own(
    engine: GraphEngine, wanted: dict[tuple[int, bool], tuple[LayerBatch, Tensor]], reached: list[bool]
) -> None:
    """Each is begun while the one ahead computes, and its memory is written over only once it was waited for."""
    cases = [case for case in wanted.values() if 16 <= case[0].num_tokens <= 256]
    with pinned() as first, registered() as second:
        rooms = first, second
        ahead, expected = engine.begin(placed(cases[0][0], first, 0)), cases[0][1]
        for number in range(1, 200):
            batch, behind_expected = cases[number * 5 % len(cases)]
            behind = engine.begin(placed(batch, rooms[number % 2], 0))
            assert same_bits(ahead.result(), expected), number
            rooms[(number - 1) % 2].fill_(torch.nan)
            ahead, expected = behind, behind_expected
        assert same_bits(ahead.result(), expected)
    assert all(reached)


def test_an_output_is_an_input_where_it_lies(
    engine: GraphEngine, wanted: dict[tuple[int, bool], tuple[LayerBatch, Tensor]], reached: list[bool]
) -> None:
    batch, _ = wanted[64, True]
    first = engine.forward(batch)
    second = engine.forward(replace(batch, hidden_states=first))
    assert reached == [False, True]
    assert same_bits(second, engine.forward(replace(batch, hidden_states=first.clone())))


def test_the_driver_knows_what_is_locked(gpu: Gpu) -> None:  # noqa: ARG001 (skips without one)
    asked, buffer, device = PageLocked(), PinnedBuffer(1 << 16), DeviceBuffer(1 << 16)
    assert asked.device_address(buffer.pointer, 1 << 16) == buffer.device_pointer
    assert asked.device_address(buffer.pointer + 48, 100) == buffer.device_pointer + 48
    assert asked.device_address(device.pointer, 64) == 0
    storage = np.zeros(3 << 12, np.uint8)
    page = storage.ctypes.data + -storage.ctypes.data % 4096
    assert asked.device_address(page, 64) == 0
    call(driver.cuMemHostRegister, page, 4096, mapped())
    start = int(call(driver.cuMemHostGetDevicePointer, page, 0))
    assert asked.device_address(page, 4096) == start
    assert asked.device_address(page + 4000, 96) == start + 4000
    assert asked.device_address(page, 4097) == 0, "the next page is not locked"
    call(driver.cuMemHostUnregister, page)
    assert asked.device_address(page, 64) == 0
    for owned in (buffer, device):
        owned.close()
