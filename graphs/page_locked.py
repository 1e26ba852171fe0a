"""Whether memory of the host is page-locked: asked of the driver, for memory that others allocated."""

import ctypes

from .driver import driver

CALL = "cuPointerGetAttributes"
CALL_VERSION = 7000
"""The CUDA version whose form of that call this is."""


class PageLocked:
    """Finds out where the device reaches memory of the host, in the context that is current then.

    The driver is called by its address: the bindings make Python objects of every attribute, which takes longer than
    a small copy. To memory that it does not know it gives no type, and nothing is raised. For one thread at a time.
    """

    def __init__(self) -> None:
        kind, address = driver.CUpointer_attribute, ctypes.c_uint64()
        wanted = (kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kind.CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        self._host = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        self._type, self._address = ctypes.c_uint(), address
        self._wanted = (ctypes.c_int * 2)(*map(int, wanted))
        self._found = (ctypes.c_void_p * 2)(ctypes.addressof(self._type), ctypes.addressof(self._address))
        self._arguments = 2, ctypes.addressof(self._wanted), ctypes.addressof(self._found)
        self._call = _attributes_call()

    def device_address(self, address: int, num_bytes: int) -> int:
        """The device's address of ``num_bytes`` of host memory at ``address``; 0 unless all of them are page-locked and
        reached."""
        if self._call is None:
            return 0
        first = self._of(address)
        if not first:
            return 0
        return first if self._of(address + num_bytes - 1) == first + num_bytes - 1 else 0

    def _of(self, address: int) -> int:
        """The device's address of one byte; 0 where that is not page-locked memory of the host."""
        assert self._call is not None
        self._type.value = self._address.value = 0
        if self._call(*self._arguments, address) or self._type.value != self._host:
            return 0
        return self._address.value


def _attributes_call() -> "ctypes._CFunctionType | None":
    found = driver.cuGetProcAddress(CALL.encode(), CALL_VERSION, 0)
    if found[0] != 0 or not found[1]:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)(
        int(found[1])
    )
