"""Kernel arguments packed as the driver takes them."""

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..layer.errors import EngineError
from ..layer.layout import round_up


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: a value and its ``struct`` format, of one number."""

    format: str
    value: int | float

    @property
    def size(self) -> int:
        """Bytes that the kernel sees, and what their place is a multiple of."""
        return struct.calcsize(self.format)

    def pack(self, value: int | float) -> bytes:
        """``value`` as the kernel reads it. Raises ``struct.error`` or ``OverflowError`` where it does not fit."""
        return struct.pack(self.format, value)


def int32(value: int) -> Argument:
    """A C ``int``."""
    return Argument("<i", value)


def uint32(value: int) -> Argument:
    """A C ``unsigned``."""
    return Argument("<I", value)


def int64(value: int) -> Argument:
    """A C ``long long``."""
    return Argument("<q", value)


def float32(value: float) -> Argument:
    """A C ``float``."""
    return Argument("<f", value)


def pointer(address: int) -> Argument:
    """A device address; 0 is the null pointer."""
    return Argument("<Q", address)


class ArgumentBlock:
    """A kernel's arguments in one block of memory, with the ``void**`` array that a launch takes.

    A launch, or a capture of it, copies the values: setting one changes later launches only, and no captured graph.
    """

    def __init__(self, arguments: Mapping[str, Argument]) -> None:
        self.arguments = dict(arguments)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, argument in self.arguments.items():
            self._offsets[name] = round_up(end, argument.size)
            end = self._offsets[name] + argument.size
        self._storage = (ctypes.c_uint64 * max(-(-end // 8), 1))()
        self._base = ctypes.addressof(self._storage)
        addresses = [self._base + offset for offset in self._offsets.values()]
        self._pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self.address = ctypes.addressof(self._pointers)
        for name, argument in self.arguments.items():
            self.set(name, argument.value)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each argument, in the kernel's order."""
        return [argument.size for argument in self.arguments.values()]

    def address_of(self, name: str) -> ctypes.c_uint64:
        """Where the argument ``name``, a ``pointer``, lies: what is stored there is what later launches are given."""
        return ctypes.c_uint64.from_buffer(self._storage, self._offsets[name])

    def set(self, name: str, value: int | float) -> None:
        """Replace one value in place. Raises ``EngineError`` for an unknown name or a value that does not fit."""
        if name not in self.arguments:
            raise EngineError(f"there is no argument {name}; there are {', '.join(self.arguments)}")
        try:
            data = self.arguments[name].pack(value)
        except (struct.error, OverflowError) as error:
            raise EngineError(f"argument {name} cannot be {value!r}: {error}") from error
        ctypes.memmove(self._base + self._offsets[name], data, len(data))
