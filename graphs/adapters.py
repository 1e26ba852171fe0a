"""Adapter slots on the GPU: fixed addresses for every layer, filled with packed adapters by the copy stream."""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..layer.adapter import Adapter, KeptAdapter
from ..layer.errors import AdapterRefusedError
from ..layer.spec import LayerSpec
from .buffers import LAYER_ARGS, LORA_ENTRY
from .geometry import Geometry
from .memory import DeviceBuffer, PinnedBuffer, copy_rows_to_device
from .packed import ENTRIES, SLABS, PackedAdapter, Packer, Run
from .streams import Stream

STAGING_BYTES = 4 << 20
"""Pinned memory that adapters pass through: what is under way at a time, so that a swap never holds the bus for longer
than the tenth of a millisecond that this takes."""


class Passage:
    """The way of packed adapters onto the GPU, through ``num_bytes`` of pinned memory and over one stream.

    Content moves into that memory as much at a time as it holds, and only that is waited for: while it is written over,
    nothing is under way from there.
    """

    def __init__(self, num_bytes: int, stream: Stream) -> None:
        self._memory = PinnedBuffer(num_bytes)
        self._stream = stream
        self._content: Tensor | None = None
        self._start = self._end = 0

    def open(self, content: Tensor) -> None:
        """What is sent next lies in ``content``, bytes on the host, which is kept until all has arrived."""
        self._content, self._start, self._end = content, 0, 0

    def send(self, run: Run, target: int, pitch: int) -> None:
        """Copy the rows of ``run`` to ``target``, one every ``pitch`` bytes."""
        _, _, _, place, width, rows = run
        while rows:
            if not self._start <= place <= self._end - width:
                self._bring(place)
            count = min(rows, (self._end - place) // width)
            source = self._memory.pointer + place - self._start
            copy_rows_to_device(target, pitch, source, width, width, count, self._stream)
            place, target, rows = place + count * width, target + count * pitch, rows - count

    def wait(self) -> None:
        """Wait until all has arrived; the content may go then."""
        self._stream.synchronize()
        self._content = None

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _bring(self, place: int) -> None:
        """Have pinned memory hold the content from ``place`` on."""
        assert self._content is not None
        self._stream.synchronize()
        size = min(self._memory.num_bytes, self._content.nbytes - place)
        ctypes.memmove(self._memory.pointer, self._content.data_ptr() + place, size)
        self._start, self._end = place, place + size


class AdapterSlots:
    """The slots of one layer: ``max_loras`` adapters at ``max_lora_rank``, and their table of entries.

    Raises ``DriverError`` where memory is short.
    """

    def __init__(self, spec: LayerSpec, geometry: Geometry) -> None:
        self.spec = spec
        self.geometry = geometry
        self._pitches = {**geometry.slab_bytes, ENTRIES: LORA_ENTRY.itemsize}
        self._memory = {
            name: DeviceBuffer(pitch * geometry.experts * geometry.max_loras) for name, pitch in self._pitches.items()
        }
        self._entries.write(torch.zeros(self._entries.num_bytes, dtype=torch.uint8))

    @property
    def num_bytes(self) -> int:
        """GPU bytes of all slots of the layer."""
        return sum(buffer.num_bytes for buffer in self._memory.values())

    @property
    def largest_row(self) -> int:
        """The most bytes that are sent in one piece: those of one expert, or of a slot's table."""
        return max(self.table_bytes, *self._pitches.values())

    @property
    def table_bytes(self) -> int:
        """Bytes of a slot's table, which is what makes its adapter live or, all zero, the slot empty."""
        return self.geometry.experts * LORA_ENTRY.itemsize

    def fill_args(self, args: "np.ndarray[tuple[()], np.dtype[np.void]]") -> None:
        """Write the slots' addresses into a layer's head."""
        assert args.dtype == LAYER_ARGS
        for name, buffer in self._memory.items():
            args[name] = buffer.pointer

    def send(self, slot: int, run: Run, passage: Passage) -> None:
        """Send ``run``, which is of this layer, to ``slot``."""
        name = SLABS[run.slab]
        pitch = self._pitches[name]
        target = self._memory[name].pointer + slot * pitch * self.geometry.experts + run.offset
        passage.send(run, target, max(pitch, run.width))

    def close(self) -> None:
        """Free the slots."""
        for buffer in self._memory.values():
            buffer.close()

    @property
    def _entries(self) -> DeviceBuffer:
        return self._memory[ENTRIES]


class SlotBank:
    """All layers' slots and the memory that adapters pass through on their way there, over the copy stream."""

    def __init__(self, layers: Mapping[int, AdapterSlots], max_lora_rank: int, stream: Stream) -> None:
        self._layers = layers
        self._max_lora_rank = max_lora_rank
        self._packer = Packer({index: (layer.spec, layer.geometry) for index, layer in layers.items()})
        self._passage = Passage(max([STAGING_BYTES, *(layer.largest_row for layer in layers.values())]), stream)
        self._empty = torch.zeros(max(layer.table_bytes for layer in layers.values()), dtype=torch.uint8)
        self._filled: set[int] = set()

    def install(self, slot: int, adapter: KeptAdapter) -> None:
        """Replace what ``slot`` holds, whole; no forward may be using it, others may run meanwhile.

        Its tables are written last, through the copy stream alone, which alone is waited for; one call at a time. An
        ``Adapter`` is packed first. Raises ``AdapterRefusedError`` for a rank beyond the slots'.
        """
        if (rank := adapter.facts.max_rank) > self._max_lora_rank:
            raise AdapterRefusedError("r", f"a rank of at most {self._max_lora_rank}", str(rank))
        packed = self._packer.pack(adapter) if isinstance(adapter, Adapter) else adapter
        assert isinstance(packed, PackedAdapter)
        self._filled.add(slot)
        self._passage.open(packed.content)
        for row in packed.runs.tolist():
            run = Run(*row)
            self._layers[run.layer].send(slot, run, self._passage)
        self._passage.wait()

    def remove(self, slot: int) -> None:
        """Empty ``slot``; an empty one is left as it is."""
        if slot not in self._filled:
            return
        self._passage.open(self._empty)
        for index, layer in self._layers.items():
            run = Run(index, SLABS.index(ENTRIES), 0, 0, layer.table_bytes, 1)
            layer.send(slot, run, self._passage)
        self._passage.wait()
        self._filled.discard(slot)

    def close(self) -> None:
        """Free the memory and the slots."""
        self._passage.close()
        for layer in self._layers.values():
            layer.close()
