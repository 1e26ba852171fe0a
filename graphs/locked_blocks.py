"""Blocks of page-locked memory, handed out without a copy and taken back once nobody looks at them any more."""

import ctypes
import logging
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .driver import DriverError, call, driver

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""What blocks are aligned to: rows that kernels write start on whole lines, and no page is locked twice."""


class Block(NamedTuple):
    """Host memory of a fixed size, a ctypes array that lives as long as anything looks at it, and its address on the
    host and on the device."""

    memory: Any
    host: int
    device: int


class LockedBlocks:
    """``count`` blocks of ``num_bytes``, page-locked in place, so that a view of one is safe even after ``close``; with
    one line in the log, as many as the host has room for.

    The device reaches them: copies may begin or end there, and kernels may read and write there. They may be taken on
    any thread.
    """

    def __init__(self, count: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._blocks: list[Block] = []
        try:
            while len(self._blocks) < count:
                self._blocks.append(_locked(num_bytes))
        except (DriverError, MemoryError) as error:
            told = "%d of %d blocks of %d bytes can be page-locked, and what has none is copied: %s"
            logger.warning(told, len(self._blocks), count, num_bytes, error or "the host has no memory left")
        self._free = deque(self._blocks)

    def take(self, num_bytes: int) -> Block | None:
        """A free block that holds ``num_bytes``, or None."""
        if num_bytes > self.num_bytes:
            return None
        try:
            return self._free.pop()
        except IndexError:
            return None

    def rows(self, block: Block, rows: int, columns: int) -> Tensor:
        """The bf16 ``[rows, columns]`` at the block's start; the block is free again when its last view is gone."""
        array = self._array(block, np.int16, rows * columns)
        return torch.from_numpy(array).view(torch.bfloat16).view(rows, columns)

    def octets(self, block: Block, num_bytes: int) -> memoryview:
        """The first ``num_bytes`` of the block; it is free again when the last view of them is gone."""
        return self._array(block, np.uint8, num_bytes).data

    def _array(self, block: Block, dtype: Any, count: int) -> "np.ndarray[Any, Any]":
        array = np.frombuffer(block.memory, dtype=dtype, count=count)
        weakref.finalize(array, self._free.append, block).atexit = False
        return array

    def close(self) -> None:
        """Unlock the memory; views stay good. A second call does nothing."""
        while self._blocks:
            call(driver.cuMemHostUnregister, self._blocks.pop().host)


def _locked(num_bytes: int) -> Block:
    """A new block, page-locked and mapped for the device."""
    storage = (ctypes.c_uint8 * (num_bytes + PAGE_BYTES))()
    memory = (ctypes.c_uint8 * num_bytes).from_buffer(storage, -ctypes.addressof(storage) % PAGE_BYTES)
    host = ctypes.addressof(memory)
    flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    call(driver.cuMemHostRegister, host, num_bytes, flags)
    try:
        return Block(memory, host, int(call(driver.cuMemHostGetDevicePointer, host, 0)))
    except DriverError:
        call(driver.cuMemHostUnregister, host)
        raise
