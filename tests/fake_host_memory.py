"""Page-locked memory of a driver of plain Python: what was locked is known, and at which address the device sees it."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
from typing import Any

from moelet.graphs.driver import driver

HOST, DEVICE = 1, 2
"""``CUmemorytype``."""


class FakeHostMemory:
    """The part of a driver that locks memory; ``locked`` has the bytes that are, by the address of the first."""

    locked: dict[int, int]
    allocations: dict[int, Any]

    def cuMemAlloc(self, num_bytes: int) -> Any:
        raise NotImplementedError

    def cuMemFree(self, address: Any) -> Any:
        raise NotImplementedError

    def cuMemHostAlloc(self, num_bytes, flags):
        _, address = self.cuMemAlloc(num_bytes)
        self.locked[int(address)] = num_bytes
        return success(int(address))

    def cuMemFreeHost(self, address):
        del self.locked[int(address)]
        return self.cuMemFree(address)

    def cuMemHostRegister(self, address, num_bytes, flags):
        self.locked[address] = num_bytes
        return success()

    def cuMemHostUnregister(self, address):
        del self.locked[address]
        return success()

    def cuMemHostGetDevicePointer(self, address, flags):
        return success(driver.CUdeviceptr(address))

    def cuPointerGetAttributes(self, count, attributes, data, address):
        """As one of CUDA 13: of memory that nobody locked every attribute is 0."""
        wanted = (ctypes.c_int * count).from_address(attributes)
        places = (ctypes.c_void_p * count).from_address(data)
        kind, mapped = self.kind_of(address)
        for attribute, place in zip(wanted, places, strict=True):
            match driver.CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_"):
                case "MEMORY_TYPE":
                    ctypes.c_uint.from_address(place).value = kind
                case "DEVICE_POINTER":
                    ctypes.c_uint64.from_address(place).value = mapped
                case _:
                    return int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
        return 0

    def kind_of(self, address: int) -> tuple[int, int]:
        """The type of memory and the device's address of it; 0 where that is not known."""
        if any(start <= address < start + size for start, size in self.locked.items()):
            return HOST, int(self.cuMemHostGetDevicePointer(address, 0)[1])
        on_device = any(start <= address < start + len(each) for start, each in self.allocations.items())
        return (DEVICE, address) if on_device else (0, 0)


def success(*values: Any) -> tuple[Any, ...]:
    return (driver.CUresult.CUDA_SUCCESS, *values)
