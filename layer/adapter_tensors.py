"""A safetensors file from an unknown hand: its header checked to the last byte, its tensors read one by one.

The file is read, not mapped: a mapped file that its writer truncates meanwhile kills the process
with a bus error. Format: https://github.com/huggingface/safetensors#format.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from .adapter_json import parse_object, shown
from .errors import AdapterRefusedError

WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 64 << 20
MOST_TENSORS = 1 << 18
"""More than the largest models served have matrices that an adapter may change, alone or by expert."""
MOST_DIMENSIONS = 8

_DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in the file: ``dtype`` as safetensors spells it, bytes ``begin .. end`` after the header."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of one open safetensors file, by key; closes ``file`` when left.

    Raises ``AdapterRefusedError`` for a header that lies: about its own length, about lengths and
    places of tensors (which must cover the file without a gap or an overlap), or with a key twice.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        try:
            header, self._start = _read_header(file)
            header.pop("__metadata__", None)
            if len(header) > MOST_TENSORS:
                raise _refuse(f"at most {MOST_TENSORS} tensors", f"{len(header)}")
            self.tensors: Mapping[str, StoredTensor] = {key: _stored(key, header[key]) for key in header}
            _check_cover(self.tensors.values(), os.fstat(file.fileno()).st_size - self._start)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, stored: StoredTensor) -> Tensor:
        """``stored`` as bf16, in memory of its own.

        Raises ``AdapterRefusedError`` for dtypes other than fp32, fp16 and bf16, for tensors without
        elements, and for values that are not finite in bf16.
        """
        if not math.prod(stored.shape):
            raise AdapterRefusedError(stored.key, "a tensor with elements", f"shape {list(stored.shape)}")
        if stored.dtype not in _DTYPES:
            raise AdapterRefusedError(stored.key, "dtype F32, F16 or BF16", shown(stored.dtype))
        raw = torch.empty(stored.end - stored.begin, dtype=torch.uint8)
        _fill(self._file, self._start + stored.begin, raw.numpy().data)
        tensor = raw.view(_DTYPES[stored.dtype]).view(stored.shape).bfloat16()
        for extreme in tensor.aminmax():  # NaN if there is one, and ten times faster than isfinite
            if not math.isfinite(value := extreme.item()):
                raise AdapterRefusedError(stored.key, "finite numbers", f"{value} in bf16")
        return tensor


def _refuse(expected: str, found: str) -> AdapterRefusedError:
    return AdapterRefusedError(WEIGHTS, expected, found)


def _read_header(file: FileIO) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise _refuse("a safetensors file", f"{size} bytes")
    prefix = bytearray(8)
    _fill(file, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise _refuse("a whole safetensors file", f"{size} bytes that claim a header of {length}")
    content = bytearray(length)
    _fill(file, 8, memoryview(content))
    return parse_object(WEIGHTS, bytes(content)), 8 + length


def _fill(file: FileIO, start: int, target: memoryview) -> None:
    file.seek(start)
    filled = 0
    while filled < len(target):
        count = file.readinto(target[filled:])
        if not count:
            raise _refuse("a whole safetensors file", "one that was truncated while it was read")
        filled += count


def _stored(key: str, entry: object) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **rest} if not rest:
            numbers = [*shape, begin, end]
            if len(shape) <= MOST_DIMENSIONS and all(type(number) is int and 0 <= number < 2**63 for number in numbers):
                stored = StoredTensor(key=key, dtype=dtype, shape=tuple(shape), begin=begin, end=end)
                _check_length(stored)
                return stored
    raise AdapterRefusedError(key, "a dtype, a shape and two offsets in the header", shown(entry))


def _check_length(stored: StoredTensor) -> None:
    if stored.dtype not in _DTYPES:
        return
    nbytes = math.prod(stored.shape) * _DTYPES[stored.dtype].itemsize
    if stored.end - stored.begin != nbytes:
        raise AdapterRefusedError(
            stored.key,
            f"{nbytes} bytes for {stored.dtype} {list(stored.shape)}",
            f"bytes {stored.begin}..{stored.end}",
        )


def _check_cover(tensors: Iterable[StoredTensor], size: int) -> None:
    """The tensors lie end to end in the ``size`` bytes after the header."""
    place = 0
    for stored in sorted(tensors, key=lambda stored: (stored.begin, stored.end)):
        if stored.begin != place or stored.end < stored.begin:
            raise AdapterRefusedError(
                stored.key, f"data that starts at byte {place}", f"bytes {stored.begin}..{stored.end}"
            )
        place = stored.end
    if place != size:
        raise _refuse(f"{place} bytes of tensors", f"{size}")
