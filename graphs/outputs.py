"""Pinned memory that outputs arrive in, handed out without a copy and taken back once nobody looks at it any more."""

import ctypes
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .driver import call, driver

Block = Any
"""Host memory of a fixed size, a ctypes array: it lives as long as anything looks at it."""


class OutputBlocks:
    """``count`` blocks of ``num_bytes``, page-locked in place, so that a view of one is safe even after ``close``."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._blocks = [(ctypes.c_uint8 * num_bytes)() for _ in range(count)]
        for block in self._blocks:
            flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE)
            call(driver.cuMemHostRegister, ctypes.addressof(block), num_bytes, flags)
        self._free = deque(self._blocks)

    def take(self, num_bytes: int) -> Block | None:
        """A free block that holds ``num_bytes``, or None."""
        if num_bytes > self.num_bytes:
            return None
        try:
            return self._free.pop()
        except IndexError:
            return None

    def view(self, block: Block, rows: int, columns: int) -> Tensor:
        """The bf16 ``[rows, columns]`` at the block's start; the block is free again when its last view is gone."""
        array = np.frombuffer(block, dtype=np.int16, count=rows * columns)
        weakref.finalize(array, self._free.append, block).atexit = False
        return torch.from_numpy(array).view(torch.bfloat16).view(rows, columns)

    def close(self) -> None:
        """Unlock the memory; views stay good. A second call does nothing."""
        while self._blocks:
            call(driver.cuMemHostUnregister, ctypes.addressof(self._blocks.pop()))
