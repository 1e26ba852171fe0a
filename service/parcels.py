"""Carries an adapter, or why there is none, from one process to another, in a file that lies in memory alone."""

import ctypes
import errno
import json
import math
import mmap
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from ..graphs.packed import HostBytes, PackedAdapter
from ..layer import errors
from ..layer.adapter import Adapter, AdapterFacts, AdapterLayout, KeptAdapter, LayerAdapter, LoraWeights
from ..layer.layout import round_up
from .unmapping import Mapped, Unmapping

ALIGNMENT = 64
LONGEST_LETTER = 1 << 15
FEW_TENSORS = 8
_PARTS = ("a", "b", "scaling", "ranks")
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)}
_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (MemoryError, OSError, *vars(errors).values())
    if isinstance(kind, type) and issubclass(kind, Exception)
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


Content = KeptAdapter | tuple[str, KeptAdapter] | Exception
"""What is carried: an adapter, one with the folder that it was found in, or why there is none."""


def pack(content: Content) -> tuple[int, bytes]:
    """A descriptor of a file with the tensors of ``content``, as they are and each once, which whoever gets it maps;
    and a letter of at most ``LONGEST_LETTER`` bytes that says what they are, or that the file says it behind them.

    Raises ``MemoryError``.
    """
    tensors = _Tensors()
    told = json.dumps(_told(content, tensors)).encode()
    where = b"%d %d " % (tensors.end, len(tensors.places))
    file = os.memfd_create("moelet-adapter", os.MFD_CLOEXEC)
    try:
        for tensor, offset in tensors.places.values():
            _write(file, offset, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if len(where) + len(told) > LONGEST_LETTER:
            _write(file, tensors.end, memoryview(told))
            told = b""
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryError("the host has no room for an adapter") from error
        raise
    return file, where + told


def takes_long(letter: bytes) -> bool:
    """Whether it takes longer to unpack what comes with ``letter`` than an event loop has."""
    _, count, told = letter.split(b" ", 2)
    return not told or int(count) > FEW_TENSORS


def unpack(file: int, letter: bytes, path: Path, unmapping: Unmapping) -> tuple[str, KeptAdapter]:
    """The folder that was packed, or else ``path``, and the adapter that ``pack`` put into ``file``, whose tensors stay
    mapped while they live; closes ``file``.

    The adapter's own ``path`` is that given. Raises the error that was packed, and ``MemoryError``.
    """
    size, _, text = letter.split(b" ", 2)
    end = int(size)
    try:
        told = _loaded(text or os.pread(file, os.fstat(file).st_size - end, end))
        memory = _map(file, end, unmapping) if end else None
    finally:
        os.close(file)
    if "error" in told:
        raise _error(**told)
    folder = told.pop("folder", None) or str(path)
    if "facts" not in told:
        return folder, _adapter(told, path, _reader(memory))
    assert memory is not None
    return folder, _packed(told, path, memory)


def _loaded(text: bytes) -> dict[str, Any]:
    """JSON of ours, quickly unless there is half a character in it, as there may be in a path."""
    try:
        told: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:
        told = json.loads(text)
    return told


def _reader(memory: Mapped | None) -> Callable[..., Tensor]:
    """What gives tensors in ``memory``, the same for the same place; none where there is none."""
    octets: Any = None
    if memory is not None:
        octets = (ctypes.c_uint8 * memory.size).from_address(memory.address)
        octets.memory = memory  # as long as any tensor is there
    read: dict[int, Tensor] = {}

    def tensor(offset: int, dtype: str, shape: list[int]) -> Tensor:
        if offset not in read:
            flat = torch.frombuffer(octets, dtype=_DTYPES[dtype], count=math.prod(shape), offset=offset)
            read[offset] = flat if len(shape) == 1 else flat.view(shape)
        return read[offset]

    return tensor


def _told(content: Content, tensors: "_Tensors") -> dict[str, Any]:
    """What JSON can say of ``content``; its tensors are added to ``tensors``."""
    match content:
        case (folder, adapter):
            return {"folder": folder, **_told(adapter, tensors)}
        case Adapter():
            return _told_adapter(content, tensors)
        case PackedAdapter():
            return _told_packed(content, tensors)
        case Exception():
            return _told_error(content)
        case _:
            raise TypeError(f"a {type(content).__name__} cannot be carried")


class _Tensors:
    """Where tensors are to lie, and where the last of them ends."""

    def __init__(self) -> None:
        self.places: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
        self.end = 0

    def add(self, tensor: Tensor) -> tuple[int, str, list[int]]:
        """The offset, dtype and shape of ``tensor``; one that was added before has its place already."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.places:
            self.places[key] = (tensor, self.end)
            self.end += round_up(max(tensor.nbytes, 1), ALIGNMENT)
        return self.places[key][1], str(tensor.dtype), list(tensor.shape)


def _told_adapter(adapter: Adapter, tensors: _Tensors) -> dict[str, Any]:
    layers = {
        index: {name: {part: tensors.add(getattr(weights, part)) for part in _PARTS} for name, weights in layer.items()}
        for index, layer in adapter.layers.items()
    }
    facts = {name: getattr(adapter, name) for name in ("rank", "lora_alpha", "scaling", "ignored_keys")}
    return {**facts, "layers": layers}


def _adapter(told: dict[str, Any], path: Path, tensor: Callable[..., Tensor]) -> Adapter:
    layers = {
        int(index): LayerAdapter(
            **{name: LoraWeights(**{part: tensor(*where[part]) for part in _PARTS}) for name, where in layer.items()}
        )
        for index, layer in told.pop("layers").items()
    }
    return Adapter(path=path, layers=layers, ignored_keys=tuple(told.pop("ignored_keys")), **told)


def _told_packed(adapter: PackedAdapter, tensors: _Tensors) -> dict[str, Any]:
    facts = {**asdict(adapter.facts), "path": None}
    return {"facts": facts, **{part: tensors.add(_as_tensor(getattr(adapter, part))) for part in ("content", "runs")}}


def _as_tensor(content: HostBytes) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * content.nbytes).from_address(content.pointer), dtype=torch.uint8)


def _packed(told: dict[str, Any], path: Path, memory: Mapped) -> PackedAdapter:
    facts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["facts"].items()
    }
    facts |= {"path": path, "layout": AdapterLayout(facts["layout"])}
    content, runs = (
        HostBytes(memory.address + offset, size, memory) for offset, _, [size] in (told["content"], told["runs"])
    )
    return PackedAdapter(facts=AdapterFacts(**facts), content=content, runs=runs)


def _told_error(error: Exception) -> dict[str, Any]:
    """``error`` without what it holds on to; one that nobody meant to be told of tells where it came from."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), None)
    if kind is None:
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return {"error": None, "arguments": [text], "attributes": {}, "trace": trace}
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int)}
    return {"error": kind, "arguments": list(error.args), "attributes": attributes, "trace": ""}


def _error(error: str | None, arguments: list[Any], attributes: dict[str, Any], trace: str) -> Exception:
    kind = RuntimeError if error is None else _ERRORS[error]
    raised = kind.__new__(kind, *arguments)  # not made by what it says of itself: some take other arguments
    raised.args = tuple(arguments)
    vars(raised).update(attributes)
    if trace:
        raised.add_note(f"in the process that reads adapters:\n{trace}")
    return raised


def _write(file: int, offset: int, content: memoryview) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done : done + (1 << 30)], offset + done)


def _map(file: int, size: int, unmapping: Unmapping) -> Mapped:
    """The first ``size`` bytes of ``file``, until nothing refers to them; unlike ``mmap`` it keeps no descriptor."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"an adapter of {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return unmapping.watched(address, size)
