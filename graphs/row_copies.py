"""Copies of rows onto the GPU, many of them put on a stream by one call of the driver."""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np

from .driver import check, driver
from .memory import copy_rows_to_device
from .packing import Array
from .streams import Stream

TARGET, PITCH, SOURCE, WIDTH, HEIGHT = range(5)
"""The columns of a copy, which is ``HEIGHT`` rows of ``WIDTH`` bytes: they lie behind each other at ``SOURCE``, in
pinned memory, and go to ``TARGET`` on the device, ``PITCH`` bytes from one to the next, which is no less than that."""

BATCH_CALL = "cuMemcpy3DBatchAsync"
BATCH_VERSION = 13000
"""The CUDA version whose form of that call this is."""

OPERATION = np.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=np.int64)
"""``CUDA_MEMCPY3D_BATCH_OP`` but for what ``FIELDS`` are: two ``CUmemcpy3DOperand`` (that it is an address, that, bytes
from row to row, rows of a layer, no hint), the extent, and that the source is read in stream order."""
FIELDS = [1, 2, 6, 7, 10, 11]
"""Where an operation has its source and bytes from row to row there, its target and those there, width, and height."""
COLUMNS = [SOURCE, WIDTH, TARGET, PITCH, WIDTH, HEIGHT]

BatchCall = Callable[[int, int, int, int], int]
"""Takes the count and the address of operations, flags and a stream; gives a ``CUresult``."""
Start = Callable[[], None]
"""Puts copies on their stream; what is put there next waits for them. Raises as ``driver.call`` does."""


class RowCopies:
    """Makes of copies what starts them together on ``stream``, in any order among themselves.

    A call of the driver lets the interpreter go, and waits for it again where others are busy: one for all rows of an
    adapter is felt less by forwards than one for each. A driver that has no such call is called for each.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._batch = batch_call()

    def prepared(self, copies: Array) -> Start:
        """What starts ``copies``, int64 ``[n, 5]``, any number of times."""
        if self._batch is None or not copies.size:
            return partial(self._start_each, copies.tolist())
        operations = np.empty((len(copies), len(OPERATION)), dtype=np.int64)
        operations[:] = OPERATION
        operations[:, FIELDS] = copies[:, COLUMNS]
        return partial(self._start_all, self._batch, operations, operations.ctypes.data)

    def _start_each(self, copies: list[list[int]]) -> None:
        for target, pitch, source, width, height in copies:
            copy_rows_to_device(target, pitch, source, width, width, height, self._stream)

    def _start_all(self, batch: BatchCall, operations: Array, pointer: int) -> None:
        if code := batch(len(operations), pointer, 0, int(self._stream)):
            check((driver.CUresult(code),), BATCH_CALL)


def batch_call() -> BatchCall | None:
    """The driver's call for many copies at once, by its address: the bindings build each operation from Python objects,
    which takes longer than to make the copies one by one. None where the driver has none."""
    found = driver.cuGetProcAddress(BATCH_CALL.encode(), BATCH_VERSION, 0)
    if found[0] != 0 or not found[1]:
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
    return kind(int(found[1]))
