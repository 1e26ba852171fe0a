"""Blocks of page-locked memory: handed out without a copy, held as long as anyone looks, then used again."""

import ctypes
import gc
from itertools import pairwise

import pytest
import torch

from fake_driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")

from moelet.graphs.driver import driver
from moelet.graphs.locked_blocks import LockedBlocks


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def filled(blocks: LockedBlocks, value: int) -> torch.Tensor:
    block = blocks.take(blocks.num_bytes)
    assert block is not None
    ctypes.memset(block.host, value, blocks.num_bytes)
    return blocks.rows(block, 4, 8)


@pytest.mark.usefixtures("fake")
def test_a_block_is_used_again_only_when_its_last_view_is_gone() -> None:
    blocks = LockedBlocks(2, 64)
    first, second = filled(blocks, 1), filled(blocks, 2)
    assert blocks.take(64) is None
    row = first[2]
    del first
    gc.collect()
    assert blocks.take(64) is None, "a row of it is still looked at"
    assert (row.view(torch.uint8) == 1).all()
    del row
    third = filled(blocks, 3)
    assert (second.view(torch.uint8) == 2).all()
    assert (third.view(torch.uint8) == 3).all()
    blocks.close()


@pytest.mark.usefixtures("fake")
def test_what_does_not_fit_is_not_taken() -> None:
    blocks = LockedBlocks(1, 64)
    assert blocks.take(65) is None
    assert LockedBlocks(0, 64).take(1) is None
    blocks.close()


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
@pytest.mark.parametrize("there", [0, 2])
def test_there_are_as_many_as_can_be_locked(
    fake: FakeDriver, name: str, there: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They only save a copy: without them a start goes on."""
    works = getattr(driver, name)

    def refuses(*arguments: object) -> object:
        if fake.calls.count(name) < there:
            return works(*arguments)
        return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)

    monkeypatch.setattr(driver, name, refuses)
    refuses.__name__ = name
    blocks = LockedBlocks(3, 64)
    taken = [blocks.take(64) for _ in range(3)]
    assert sum(block is not None for block in taken) == len(fake.locked) == there
    [line] = caplog.messages
    assert line.startswith(f"{there} of 3 blocks of 64 bytes can be page-locked, and what has none is copied: {name}")
    blocks.close()
    assert not fake.locked


def test_blocks_lie_apart_on_pages_that_the_device_reaches(fake: FakeDriver) -> None:
    blocks = LockedBlocks(3, 6000)
    taken = [blocks.take(6000) for _ in range(3)]
    places = sorted(block.host for block in taken if block is not None)
    assert all(place % 4096 == 0 for place in places)
    assert min(after - before for before, after in pairwise(places)) >= 2 * 4096, "no page is in two of them"
    assert fake.calls.count("cuMemHostGetDevicePointer") == 3
    blocks.close()


def test_views_outlive_the_pinning(fake: FakeDriver) -> None:
    blocks = LockedBlocks(1, 64)
    view = filled(blocks, 7)
    blocks.close()
    blocks.close()
    assert fake.calls.count("cuMemHostUnregister") == fake.calls.count("cuMemHostRegister") == 1
    del blocks
    gc.collect()
    assert (view.view(torch.uint8) == 7).all()
