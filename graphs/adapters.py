"""Adapter slots on the GPU: fixed addresses for every layer, filled with packed adapters by the copy stream."""

import ctypes
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from ..layer.adapter import Adapter, KeptAdapter
from ..layer.errors import AdapterRefusedError
from ..layer.spec import LayerSpec
from .buffers import LAYER_ARGS, LORA_ENTRY
from .geometry import Geometry
from .memory import DeviceBuffer, PinnedBuffer
from .packed import ENTRIES, SLABS, TABLES, HostBytes, PackedAdapter, Packer, Run, runs_of
from .packing import Array
from .row_copies import SOURCE, RowCopies, Start
from .streams import Stream

STAGING_BYTES = 4 << 20
"""Pinned memory that adapters pass through: what is under way at a time, so that a swap never holds the bus for longer
than the tenth of a millisecond that this takes."""
REMEMBERED = 64
LONGEST_REMEMBERED = 1 << 15
"""What brings adapters of one shape to one slot is prepared once, of so many shapes and slots and for runs of so many
bytes: in a busy process it takes three times as long as the rest of an install."""


class Passage:
    """The way of packed adapters onto the GPU, through ``num_bytes`` of pinned memory and over one stream.

    Content moves into that memory as much at a time as it holds, and only that is waited for: while it is written over,
    nothing is under way from there.
    """

    def __init__(self, num_bytes: int, stream: Stream) -> None:
        self._memory = PinnedBuffer(num_bytes)
        self._stream = stream
        self._copies = RowCopies(stream)
        self._under_way = False

    def holds(self, content: HostBytes) -> bool:
        """Whether ``content`` can pass at once."""
        return content.nbytes <= self._memory.num_bytes

    def prepared(self, copies: Array) -> Start:
        """What starts ``copies``, as ``RowCopies`` has them, out of content that passes at once and is there; their
        sources are places in it."""
        copies[:, SOURCE] += self._memory.pointer
        return self._copies.prepared(copies)

    def pass_at_once(self, content: HostBytes, parts: Iterable[Start]) -> None:
        """Start ``parts``, one after the other, of ``content``, which passes at once; wait until all has arrived."""
        self._bring(content, 0)
        for start in parts:
            self._begin(start)
        self._wait()

    def pass_by_pieces(self, content: HostBytes, parts: Iterable[Array]) -> None:
        """The same of any ``content``, with ``parts`` that are not prepared."""
        begin = end = 0
        for copies in parts:
            gathered: list[tuple[int, ...]] = []
            for target, pitch, place, width, rows in copies.tolist():
                while rows:
                    if not begin <= place <= end - width:
                        self._begin_gathered(gathered)
                        begin, end = place, self._bring(content, place)
                    count = min(rows, (end - place) // width)
                    gathered.append((target, pitch, self._memory.pointer + place - begin, width, count))
                    place, target, rows = place + count * width, target + count * pitch, rows - count
            self._begin_gathered(gathered)
        self._wait()

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _begin(self, start: Start) -> None:
        self._under_way = True
        start()

    def _begin_gathered(self, gathered: list[tuple[int, ...]]) -> None:
        if gathered:
            self._begin(self._copies.prepared(np.array(gathered, dtype=np.int64)))
            gathered.clear()

    def _wait(self) -> None:
        if self._under_way:
            self._stream.synchronize()
            self._under_way = False

    def _bring(self, content: HostBytes, place: int) -> int:
        """Have pinned memory hold ``content`` from ``place`` on, and up to the place that this gives."""
        self._wait()
        size = min(self._memory.num_bytes, content.nbytes - place)
        ctypes.memmove(self._memory.pointer, content.pointer + place, size)
        return place + size


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

    def places(self) -> list[tuple[int, int, int]]:
        """Of each of ``SLABS``: its address, bytes from slot to slot, and bytes from expert to expert."""
        pitches = [(name, self._pitches[name]) for name in SLABS]
        return [(self._memory[name].pointer, pitch * self.geometry.experts, pitch) for name, pitch in pitches]

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
        clearing = [Run(index, TABLES, 0, 0, layer.table_bytes, 1) for index, layer in layers.items()]
        self._clearing = np.array(clearing, dtype=np.int64).tobytes()
        self._remembered = lru_cache(REMEMBERED)(self._prepare)
        self._empty = HostBytes.of(np.zeros(max(layer.table_bytes for layer in layers.values()), np.uint8))
        self._filled: set[int] = set()
        self._places = np.zeros((max(layers) + 1, len(SLABS), 3), dtype=np.int64)
        for index, layer in layers.items():
            self._places[index] = layer.places()

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
        self._send(slot, packed.content, packed.runs.copied())

    def remove(self, slot: int) -> None:
        """Empty ``slot``; an empty one is left as it is."""
        if slot in self._filled:
            self._send(slot, self._empty, self._clearing)
            self._filled.discard(slot)

    def _send(self, slot: int, content: HostBytes, runs: bytes) -> None:
        """Copy ``runs`` of ``content``, the tables after all else, and wait."""
        if not self._passage.holds(content):
            self._passage.pass_by_pieces(content, self._copies(slot, runs))
        elif len(runs) > LONGEST_REMEMBERED:
            self._passage.pass_at_once(content, self._prepare(slot, runs))
        else:
            self._passage.pass_at_once(content, self._remembered(slot, runs))

    def _prepare(self, slot: int, runs: bytes) -> list[Start]:
        return [self._passage.prepared(copies) for copies in self._copies(slot, runs)]

    def _copies(self, slot: int, runs: bytes) -> list[Array]:
        """What brings ``runs`` to ``slot``, first all but its tables, then those; sources are places in the content."""
        layer, slab, offset, place, width, rows = runs_of(runs).T
        base, slot_bytes, pitch = self._places[layer, slab].T
        copies = np.stack([base + slot * slot_bytes + offset, np.maximum(pitch, width), place, width, rows], axis=1)
        return [copies[slab != TABLES], copies[slab == TABLES]]

    def close(self) -> None:
        """Free the memory and the slots."""
        self._passage.close()
        for layer in self._layers.values():
            layer.close()
