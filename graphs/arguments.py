"""Kernel arguments packed as the driver takes them, tensor maps included."""

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..layer.errors import EngineError
from .driver import call, driver

_BLOCK_ALIGNMENT = 64  # what a CUtensorMap asks for


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: a value with its ``struct`` format, or raw bytes (an empty format)."""

    format: str
    value: int | float | bytes
    alignment: int

    @property
    def size(self) -> int:
        """Bytes that the kernel sees."""
        return struct.calcsize(self.format) if self.format else len(self._raw())

    def pack(self, value: int | float | bytes) -> bytes:
        """``value`` as the kernel reads it. Raises ``struct.error`` or ``TypeError`` where it does not fit."""
        if self.format:
            return struct.pack(self.format, value)
        if not isinstance(value, bytes) or len(value) != self.size:
            raise TypeError(f"expected {self.size} raw bytes")
        return value

    def _raw(self) -> bytes:
        assert isinstance(self.value, bytes)
        return self.value


def int32(value: int) -> Argument:
    """A C ``int``."""
    return Argument("<i", value, 4)


def uint32(value: int) -> Argument:
    """A C ``unsigned int``."""
    return Argument("<I", value, 4)


def int64(value: int) -> Argument:
    """A C ``long long``."""
    return Argument("<q", value, 8)


def float32(value: float) -> Argument:
    """A C ``float``."""
    return Argument("<f", value, 4)


def pointer(address: int) -> Argument:
    """A device address; 0 is the null pointer."""
    return Argument("<Q", address, 8)


def raw(data: bytes, alignment: int = _BLOCK_ALIGNMENT) -> Argument:
    """A struct passed by value, such as the 128 bytes of a tensor map."""
    return Argument("", data, alignment)


class ArgumentBlock:
    """A kernel's arguments in one block of memory, with the ``void**`` array that a launch takes.

    A launch, or a capture of it, copies the values: setting one changes later launches only, and no captured graph.
    """

    def __init__(self, arguments: Mapping[str, Argument]) -> None:
        self.arguments = dict(arguments)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, argument in self.arguments.items():
            self._offsets[name] = -(-end // argument.alignment) * argument.alignment
            end = self._offsets[name] + argument.size
        self._storage = ctypes.create_string_buffer(end + _BLOCK_ALIGNMENT)
        self._base = -(-ctypes.addressof(self._storage) // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        addresses = [self._base + offset for offset in self._offsets.values()]
        self._pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self.address = ctypes.addressof(self._pointers)
        for name, argument in self.arguments.items():
            self.set(name, argument.value)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each argument, in the kernel's order."""
        return [argument.size for argument in self.arguments.values()]

    def set(self, name: str, value: int | float | bytes) -> None:
        """Replace one value in place. Raises ``EngineError`` for an unknown name or a value that does not fit."""
        if name not in self.arguments:
            raise EngineError(f"there is no argument {name}; there are {', '.join(self.arguments)}")
        try:
            data = self.arguments[name].pack(value)
        except (struct.error, TypeError, OverflowError) as error:
            raise EngineError(f"argument {name} cannot be {value!r}: {error}") from error
        ctypes.memmove(self._base + self._offsets[name], data, len(data))


def encode_tensor_map_2d(
    base: int, rows: int, cols: int, box_rows: int, box_cols: int, *, swizzle128: bool = True
) -> bytes:
    """The 128-byte tensor map of a row-major bf16 matrix ``[rows, cols]`` at device address ``base``.

    One load brings ``[box_rows, box_cols]``; ``swizzle128`` XORs its 16-byte chunks with row mod 8 on the way, for
    which a box row must be at most 128 bytes. Raises ``EngineError`` where the hardware's rules are broken.
    """
    if base % 16 or cols * 2 % 16 or not (1 <= box_rows <= 256 and 1 <= box_cols <= 256):
        raise EngineError(
            f"a tensor map needs a base and rows of whole 16 bytes and a box of 1..256 each way, got base {base:#x}, "
            f"{cols} columns, box {box_rows} x {box_cols}"
        )
    if box_cols * 2 % 16 or (swizzle128 and box_cols * 2 > 128):
        raise EngineError(f"a box row should be whole 16 bytes, at most 128 when swizzled, got {box_cols * 2} bytes")
    swizzle = driver.CUtensorMapSwizzle
    encoded = call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        base,
        [driver.cuuint64_t(cols), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(cols * 2)],
        [driver.cuuint32_t(box_cols), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzle128 else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)
