"""What a driver of plain Python is called for by address: batches of copies, done at once, and what memory is."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
from typing import Any

from moelet.graphs.driver import driver

BATCH_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_size_t)
POINTER_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64)
BY_ADDRESS = {b"cuMemcpy3DBatchAsync": (13000, BATCH_CALL), b"cuPointerGetAttributes": (7000, POINTER_CALL)}
"""What is asked for by its address: in which version of CUDA, and how it is called."""
BATCH_OP_BYTES = 112
"""Of ``CUDA_MEMCPY3D_BATCH_OP``."""


class FakeBatches:
    """The part of a driver that copies in batches; its calls are ``logged``, but for those ``without`` which it is."""

    without: frozenset[bytes] = frozenset()
    kept: tuple[Any, ...] = ()
    """Calls whose addresses were given: those are good while the calls are there."""

    def logged(self, name: str) -> Any:
        raise NotImplementedError

    def cuGetProcAddress(self, symbol, version, flags):
        since, kind = BY_ADDRESS[symbol]
        assert (version, flags) == (since, 0)
        if symbol in self.without:
            return (driver.CUresult.CUDA_SUCCESS, 0, 1)
        self.kept += (kind(self.logged(symbol.decode())),)
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
