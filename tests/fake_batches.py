"""Batches of copies by a driver of plain Python: what lies at the addresses of an operation is copied at once."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
from typing import Any

from moelet.graphs.driver import driver

BATCH_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_size_t)
BATCH_OP_BYTES = 112
"""Of ``CUDA_MEMCPY3D_BATCH_OP``."""


class FakeBatches:
    """The part of a driver that copies in batches, unless it has no ``batches``; its calls are ``logged``."""

    batches = True
    kept: tuple[Any, ...] = ()
    """Calls whose addresses were given: those are good while the calls are there."""

    def logged(self, name: str) -> Any:
        raise NotImplementedError

    def cuGetProcAddress(self, symbol, version, flags):
        assert (symbol, version, flags) == (b"cuMemcpy3DBatchAsync", 13000, 0)
        if not self.batches:
            return (driver.CUresult.CUDA_SUCCESS, 0, 1)
        self.kept += (BATCH_CALL(self.logged("cuMemcpy3DBatchAsync")),)
        return (driver.CUresult.CUDA_SUCCESS, ctypes.cast(self.kept[-1], ctypes.c_void_p).value, 0)

    def cuMemcpy3DBatchAsync(self, count, operations, flags, stream):
        copies = [driver.CUDA_MEMCPY3D_BATCH_OP(operations + place * BATCH_OP_BYTES) for place in range(count)]
        if not copies or flags or not all(map(is_right, copies)):
            return int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
        for copy in copies:
            source, target = copy.src.op.ptr, copy.dst.op.ptr
            for row in range(copy.extent.height):
                at = int(target.ptr) + row * target.rowLength
                ctypes.memmove(at, int(source.ptr) + row * source.rowLength, copy.extent.width)
        return 0


def is_right(copy: Any) -> bool:
    """Whether rows lie apart at either end, of addresses, and are read in stream order."""
    kinds = (int(copy.src.type), int(copy.dst.type), int(copy.srcAccessOrder), copy.flags)
    source, target, extent = copy.src.op.ptr, copy.dst.op.ptr, copy.extent
    lengths = (extent.depth, source.layerHeight, target.layerHeight)
    return (kinds, lengths) == ((1, 1, 1, 0), (1, 0, 0)) and source.rowLength >= extent.width <= target.rowLength
