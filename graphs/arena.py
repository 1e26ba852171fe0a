"""One arena of device memory for each captured shape: every buffer's place is planned before anything is captured."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layer.errors import EngineError
from ..layer.layout import round_up
from .memory import DeviceBuffer
from .streams import Stream

ALIGNMENT = 256
"""Bytes that every buffer's offset is a multiple of, unless it asks for more."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer that a program needs: its name, shape, dtype and alignment in bytes (256, or 1024 for bulk tiles)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.alignment < ALIGNMENT or self.alignment & (self.alignment - 1):
            raise EngineError(f"buffer {self.name}: alignment should be a power of two >= 256, got {self.alignment}")
        if any(size < 0 for size in self.shape):
            raise EngineError(f"buffer {self.name}: no size may be negative, got {list(self.shape)}")

    @property
    def num_bytes(self) -> int:
        """The bytes that the buffer's elements take."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArenaRow(NamedTuple):
    """One line of what an arena holds, for people: offset and bytes in bytes, dtype as torch names it."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


class ArenaPlan:
    """Where each buffer lies in an arena: in the order declared, none overlapping another.

    Two buffers of one plan never share bytes, so the hazard checker may reason by name alone.
    """

    def __init__(self, name: str, buffers: Iterable[BufferSpec]) -> None:
        self.name = name
        self.buffers: dict[str, BufferSpec] = {}
        self.offsets: dict[str, int] = {}
        end = 0
        for buffer in buffers:
            if buffer.name in self.buffers:
                raise EngineError(f"arena {name}: buffer {buffer.name} is declared twice")
            self.buffers[buffer.name] = buffer
            self.offsets[buffer.name] = round_up(end, buffer.alignment)
            end = self.offsets[buffer.name] + buffer.num_bytes
        self.total_bytes = max(round_up(end, ALIGNMENT), ALIGNMENT)
        self.alignment = max((buffer.alignment for buffer in self.buffers.values()), default=ALIGNMENT)

    def describe(self) -> list[ArenaRow]:
        """A row for each buffer, in order of offset."""
        return [
            ArenaRow(b.name, self.offsets[b.name], b.num_bytes, str(b.dtype).removeprefix("torch."), b.shape)
            for b in self.buffers.values()
        ]


class Arena:
    """The buffers of one plan at fixed addresses, in memory of its own or in an allocation shared with other shapes.

    Shapes may share because replays are ordered on one stream. Raises ``EngineError`` where ``memory`` is too small.
    """

    def __init__(self, plan: ArenaPlan, memory: DeviceBuffer | None = None) -> None:
        self._owned = memory is None
        self._memory = DeviceBuffer(_room(plan)) if memory is None else memory
        self.plan = plan
        self._base = _placed(plan, self._memory)

    def pointer(self, name: str) -> int:
        """The device address of buffer ``name``."""
        return self._base + self.plan.offsets[self._spec(name).name]

    def poison(self, stream: Stream) -> None:
        """Fill the arena with NaN, in stream order: what a program reads without writing shows."""
        self._memory.poison(stream)

    def read(self, name: str) -> Tensor:
        """A host copy of buffer ``name``, for tests and people; synchronize the stream first."""
        spec = self._spec(name)
        return self._memory.read(spec.dtype, spec.shape, self.pointer(name) - self._memory.pointer)

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a host tensor of the declared shape and dtype into buffer ``name``, and wait."""
        spec = self._spec(name)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise EngineError(
                f"buffer {name} is {spec.dtype} of shape {list(spec.shape)}, "
                f"got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        self._memory.write(tensor, self.pointer(name) - self._memory.pointer)

    def close(self) -> None:
        """Free the memory if it is this arena's own."""
        if self._owned:
            self._memory.close()

    def _spec(self, name: str) -> BufferSpec:
        try:
            return self.plan.buffers[name]
        except KeyError:
            raise EngineError(
                f"arena {self.plan.name} has no buffer {name}; it has {', '.join(self.plan.buffers)}"
            ) from None


def shared_memory(plans: Sequence[ArenaPlan]) -> DeviceBuffer:
    """One allocation that any one of ``plans`` fits into: the largest decides."""
    return DeviceBuffer(max(_room(plan) for plan in plans))


def _room(plan: ArenaPlan) -> int:
    # cuMemAlloc promises 256-byte alignment only; an arena that asks for more starts at the first address that has it
    return plan.total_bytes + plan.alignment - ALIGNMENT


def _placed(plan: ArenaPlan, memory: DeviceBuffer) -> int:
    base = round_up(memory.pointer, plan.alignment)
    if base + plan.total_bytes > memory.pointer + memory.num_bytes:
        raise EngineError(f"arena {plan.name} needs {_room(plan)} bytes, but its memory has {memory.num_bytes}")
    return base
