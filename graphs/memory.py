"""Device and pinned memory that is allocated and freed by hand, and the copies between them."""

import ctypes
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layer.errors import EngineError
from .driver import call, driver
from .hazards import Work
from .streams import Stream

POISON = 0xFF
"""The byte that poisoned memory is filled with: 0xFFFF is a NaN in bf16, as 0xFFFFFFFF is in fp32."""


class _Allocation:
    """``num_bytes`` of memory at an address; using the address after ``close`` raises ``EngineError``."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise EngineError(f"an allocation should be at least 1 byte, got {num_bytes}")
        self.num_bytes = num_bytes
        self._address: int | None = None

    @property
    def pointer(self) -> int:
        """The address of the first byte."""
        if self._address is None:
            raise EngineError(f"{type(self).__name__} of {self.num_bytes} bytes was used after it was freed")
        return self._address

    def slice(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> int:
        """The bytes that ``shape`` takes at ``offset``. Raises ``EngineError`` unless they lie inside."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise EngineError(
                f"{list(shape)} of {dtype} at offset {offset} needs {offset + num_bytes} bytes, "
                f"but the buffer has {self.num_bytes}"
            )
        return num_bytes


class DeviceBuffer(_Allocation):
    """GPU memory, 256-byte aligned by the driver. Raises ``DriverError`` where there is no room."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._address = int(call(driver.cuMemAlloc, num_bytes))

    def fill(self, byte: int, stream: Stream, work: Work | None = None) -> None:
        """Set every byte, in stream order."""
        fill(self.pointer, byte, self.num_bytes, stream, work)

    def poison(self, stream: Stream) -> None:
        """Fill with NaN, so that a read of what nobody wrote shows."""
        self.fill(POISON, stream)

    def write(self, tensor: Tensor, offset: int = 0) -> None:
        """Copy a host tensor in, and wait: for start-up and tests, not for a forward."""
        source = tensor.detach().contiguous()
        num_bytes = self.slice(source.dtype, tuple(source.shape), offset)
        if num_bytes:
            call(driver.cuMemcpyHtoD, self.pointer + offset, source.data_ptr(), num_bytes)
            # from pageable memory the call returns before the last bytes land, and no stream of ours waits for them
            call(driver.cuStreamSynchronize, driver.CUstream(0))

    def read(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> Tensor:
        """A host copy of part of the buffer; synchronize the stream that wrote it first."""
        result = torch.empty(shape, dtype=dtype)
        num_bytes = self.slice(dtype, shape, offset)
        if num_bytes:
            call(driver.cuMemcpyDtoH, result.data_ptr(), self.pointer + offset, num_bytes)
        return result

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._address is not None:
            call(driver.cuMemFree, self._address)
            self._address = None


class PinnedBuffer(_Allocation):
    """Page-locked host memory that the GPU copies from and to as it is; kernels know it by ``device_pointer``."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        flags = int(driver.CU_MEMHOSTALLOC_PORTABLE) | int(driver.CU_MEMHOSTALLOC_DEVICEMAP)
        self._address = int(call(driver.cuMemHostAlloc, num_bytes, flags))
        self.device_pointer = int(call(driver.cuMemHostGetDevicePointer, self._address, 0))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> Tensor:
        """A torch view of part of the buffer, no copy; it must not outlive the buffer."""
        if self.slice(dtype, shape, offset) == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes(), dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> "np.ndarray[Any, Any]":
        """A numpy view of part of the buffer, no copy; it must not outlive the buffer."""
        kind = np.dtype(dtype)
        if offset < 0 or offset + math.prod(shape) * kind.itemsize > self.num_bytes:
            raise EngineError(f"{list(shape)} of {kind} at offset {offset} leaves the {self.num_bytes}-byte buffer")
        return np.frombuffer(self._bytes(), dtype=kind, count=math.prod(shape), offset=offset).reshape(shape)

    def _bytes(self) -> Any:
        return (ctypes.c_uint8 * self.num_bytes).from_address(self.pointer)

    def close(self) -> None:
        """Free the memory; views of it must be gone. A second call does nothing."""
        if self._address is not None:
            call(driver.cuMemFreeHost, self._address)
            self._address = None


def copy_to_device(target: int, source: int, num_bytes: int, stream: Stream, work: Work | None = None) -> None:
    """Copy pinned host memory to the device, in stream order; ``work`` declares it, which a capture demands."""
    call(driver.cuMemcpyHtoDAsync, target, source, num_bytes, stream.handle)
    _note(stream, work)


def copy_to_host(target: int, source: int, num_bytes: int, stream: Stream, work: Work | None = None) -> None:
    """Copy device memory to pinned host memory, in stream order; ``work`` as for ``copy_to_device``."""
    call(driver.cuMemcpyDtoHAsync, target, source, num_bytes, stream.handle)
    _note(stream, work)


def copy_on_device(target: int, source: int, num_bytes: int, stream: Stream, work: Work | None = None) -> None:
    """Copy device memory to device memory, in stream order; ``work`` as for ``copy_to_device``."""
    call(driver.cuMemcpyDtoDAsync, target, source, num_bytes, stream.handle)
    _note(stream, work)


def fill(target: int, byte: int, num_bytes: int, stream: Stream, work: Work | None = None) -> None:
    """Set ``num_bytes`` bytes of device memory, in stream order; ``work`` as for ``copy_to_device``."""
    call(driver.cuMemsetD8Async, target, byte, num_bytes, stream.handle)
    _note(stream, work)


def _note(stream: Stream, work: Work | None) -> None:
    if stream.tracer is not None:
        stream.tracer(work)


def copy_rows_to_device(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: Stream
) -> None:
    """Copy ``height`` rows of ``width`` bytes from pinned host memory to the device, each side with its own pitch."""
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = source, source_pitch
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = target, target_pitch
    copy.WidthInBytes, copy.Height = width, height
    call(driver.cuMemcpy2DAsync, copy, stream.handle)
    _note(stream, None)
