"""Adapter slots on the GPU: fixed addresses for every layer, filled from the host by the copy stream."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..layer.adapter import Adapter, LayerAdapter
from ..layer.errors import AdapterRefusedError
from ..layer.layout import round_up
from ..layer.spec import LayerSpec
from .buffers import LAYER_ARGS, LORA_ENTRY
from .geometry import Geometry
from .memory import DeviceBuffer, PinnedBuffer, copy_rows_to_device
from .packing import Array, Packed, entries, pieces
from .streams import Stream

STAGING_BYTES = 4 << 20
"""Pinned memory that adapters pass through: what is under way at a time, so that a swap never holds the bus for longer
than the tenth of a millisecond that this takes."""
ALIGNMENT = 256


class Passage:
    """The way of adapters onto the GPU, through ``num_bytes`` of pinned memory and over one stream.

    Nothing is waited for until that memory is full, then all that is under way: the caller writes on meanwhile, and
    copies arrive in the order they were asked for.
    """

    def __init__(self, num_bytes: int, stream: Stream) -> None:
        self._memory = PinnedBuffer(num_bytes)
        self._stream = stream
        self._used = 0

    def send(self, packed: Packed, target: int, pitch: int) -> None:
        """Lay out ``packed`` and copy it to ``target``, an expert every ``pitch`` bytes."""
        width, done = packed.expert_bytes, 0
        while done < packed.num_experts:
            count = self._room(width, packed.num_experts - done)
            packed.write(done, self._memory.array(np.uint8, (count, width), self._used))
            self._copy(target + done * pitch, pitch, width, count)
            done += count

    def send_table(self, table: Array, target: int) -> None:
        """Copy ``table`` to ``target``."""
        width = table.nbytes
        self._room(width, 1)
        self._memory.array(np.uint8, (width,), self._used)[:] = table.view(np.uint8)
        self._copy(target, width, width, 1)

    def wait(self) -> None:
        """Wait until all has arrived."""
        self._stream.synchronize()
        self._used = 0

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _room(self, width: int, rows: int) -> int:
        """How many of ``rows`` there is room for next, at least 1."""
        if self._used + width > self._memory.num_bytes:
            self.wait()
        return min(rows, (self._memory.num_bytes - self._used) // width)

    def _copy(self, target: int, pitch: int, width: int, rows: int) -> None:
        copy_rows_to_device(target, pitch, self._memory.pointer + self._used, width, width, rows, self._stream)
        self._used = round_up(self._used + rows * width, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Slab:
    """One tensor of a slot: where it starts in the layer's memory, and bytes from one expert to the next."""

    name: str
    expert_bytes: int
    slot_bytes: int


class AdapterSlots:
    """The slots of one layer: ``max_loras`` adapters at ``max_lora_rank``, and their table of entries.

    Raises ``DriverError`` where memory is short.
    """

    def __init__(self, spec: LayerSpec, geometry: Geometry) -> None:
        self.spec = spec
        self.geometry = geometry
        experts = geometry.experts
        self._slabs = {name: Slab(name, size, size * experts) for name, size in geometry.slab_bytes.items()}
        self._memory = {name: DeviceBuffer(slab.slot_bytes * geometry.max_loras) for name, slab in self._slabs.items()}
        self._entry_bytes = experts * LORA_ENTRY.itemsize
        self._entries = DeviceBuffer(self._entry_bytes * geometry.max_loras)
        self._entries.write(torch.zeros(self._entries.num_bytes, dtype=torch.uint8))

    @property
    def num_bytes(self) -> int:
        """GPU bytes of all slots of the layer."""
        return self._entries.num_bytes + sum(buffer.num_bytes for buffer in self._memory.values())

    @property
    def largest_row(self) -> int:
        """The most bytes that are sent in one piece: those of one expert, or of a slot's table."""
        return max(self._entry_bytes, *(slab.expert_bytes for slab in self._slabs.values()))

    def fill_args(self, args: "np.ndarray[tuple[()], np.dtype[np.void]]") -> None:
        """Write the slots' addresses into a layer's head."""
        assert args.dtype == LAYER_ARGS
        for name, buffer in self._memory.items():
            args[name] = buffer.pointer
        args["lora"] = self._entries.pointer

    def send(self, slot: int, adapter: LayerAdapter, passage: Passage) -> None:
        """Send one adapter's tensors of this layer to ``slot``."""
        for piece in pieces(adapter, self.spec, self.geometry):
            slab = self._slabs[piece.slab]
            first = self._memory[piece.slab].pointer + slot * slab.slot_bytes + piece.offset
            passage.send(piece.packed, first + piece.first_expert * slab.expert_bytes, slab.expert_bytes)

    def send_entries(self, slot: int, adapter: LayerAdapter | None, passage: Passage) -> None:
        """Send a slot's table, which is what makes its adapter live or, with None, the slot empty."""
        table = entries(adapter, self.spec, self.geometry)
        passage.send_table(table, self._entries.pointer + slot * self._entry_bytes)

    def close(self) -> None:
        """Free the slots."""
        self._entries.close()
        for buffer in self._memory.values():
            buffer.close()


class SlotBank:
    """All layers' slots and the memory that adapters pass through on their way there, over the copy stream."""

    def __init__(self, layers: Mapping[int, AdapterSlots], max_lora_rank: int, stream: Stream) -> None:
        self._layers = layers
        self._max_lora_rank = max_lora_rank
        self._passage = Passage(max([STAGING_BYTES, *(layer.largest_row for layer in layers.values())]), stream)
        self._filled: set[int] = set()

    def install(self, slot: int, adapter: Adapter) -> None:
        """Replace what ``slot`` holds, whole; no forward may be using it, others may run meanwhile.

        The slot is empty while it is written, through the copy stream alone, which alone is waited for; one call at a
        time. Raises ``AdapterRefusedError`` for a rank beyond the slots'.
        """
        if adapter.max_rank > self._max_lora_rank:
            raise AdapterRefusedError("r", f"a rank of at most {self._max_lora_rank}", str(adapter.max_rank))
        self._empty(slot)
        self._filled.add(slot)
        for index, layer in self._layers.items():
            if (part := adapter.layers.get(index)) is not None:
                layer.send(slot, part, self._passage)
        for index, layer in self._layers.items():
            layer.send_entries(slot, adapter.layers.get(index), self._passage)
        self._passage.wait()

    def remove(self, slot: int) -> None:
        """Empty ``slot``; an empty one is left as it is."""
        if slot in self._filled:
            self._empty(slot)
            self._passage.wait()

    def close(self) -> None:
        """Free the memory and the slots."""
        self._passage.close()
        for layer in self._layers.values():
            layer.close()

    def _empty(self, slot: int) -> None:
        if slot in self._filled:
            for layer in self._layers.values():
                layer.send_entries(slot, None, self._passage)
            self._filled.discard(slot)
