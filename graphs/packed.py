"""An adapter packed whole: the bytes of a slot, one behind the other, and where each of them goes."""

import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..layer.adapter import Adapter, AdapterFacts
from ..layer.layout import round_up
from ..layer.spec import LayerSpec, ModelSpec
from .geometry import Geometry
from .packing import Array, Piece, entries, pieces

ENTRIES = "lora"
"""The slots' tables, by the name that a layer's head has for them."""
SLABS = ("lora_a_gate_up", "lora_b_gate_up", "lora_a_down", "lora_b_down", ENTRIES)
TABLES = SLABS.index(ENTRIES)
ALIGNMENT = 256


class Run(NamedTuple):
    """Rows of bytes that go to one slab of a slot: ``width`` bytes of each of ``rows`` experts.

    ``layer``   the layer's number
    ``slab``    which of ``SLABS``
    ``offset``  where the first row goes, in bytes from the start of the slot's part of the slab
    ``place``   where the rows lie in the content, one behind the other
    """

    layer: int
    slab: int
    offset: int
    place: int
    width: int
    rows: int


class HostBytes(NamedTuple):
    """``nbytes`` of host memory from ``pointer`` on, which are there as long as ``owner`` is."""

    pointer: int
    nbytes: int
    owner: object

    @classmethod
    def of(cls, array: Array) -> "HostBytes":
        """Those of ``array``, which has no gaps."""
        assert array.flags.c_contiguous
        return cls(array.ctypes.data, array.nbytes, array)

    def copied(self) -> bytes:
        """What they are now."""
        return ctypes.string_at(self.pointer, self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAdapter:
    """An adapter as the GPU's slots hold it: ``content``, and ``runs`` int64 ``[n, 6]``, a ``Run`` each.

    Tables come last, one for each layer served. Nothing is packed twice: runs may share their content.
    """

    facts: AdapterFacts
    content: HostBytes
    runs: HostBytes

    def at(self, path: Path) -> "PackedAdapter":
        """The same, told of as lying at ``path``."""
        return replace(self, facts=replace(self.facts, path=path))


def runs_of(octets: bytes) -> Array:
    """``PackedAdapter.runs`` as int64 ``[n, 6]``."""
    return np.frombuffer(octets, dtype=np.int64).reshape(-1, len(Run._fields))


class Packer:
    """Packs adapters for the slots of ``layers``: of each its spec and geometry."""

    def __init__(self, layers: Mapping[int, tuple[LayerSpec, Geometry]]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: ModelSpec, *, max_loras: int, max_lora_rank: int) -> "Packer":
        """For an engine that serves ``model`` with such slots."""

        def geometry(spec: LayerSpec) -> Geometry:
            # what weights and router are made of makes no difference to slots
            return Geometry.of(spec, router_fp32=False, max_loras=max_loras, max_lora_rank=max_lora_rank)

        return cls({index: (spec, geometry(spec)) for index, spec in model.layers.items()})

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """``adapter``, whose tensors can be let go of then. Its ranks must fit the slots. Raises ``MemoryError``."""
        draft = _Draft()
        for index, (spec, geometry) in self._layers.items():
            part = adapter.layers.get(index)
            for piece in pieces(part, spec, geometry) if part is not None else ():
                draft.add_piece(index, piece, geometry.slab_bytes[piece.slab])
        for index, (spec, geometry) in self._layers.items():
            draft.add_table(index, entries(adapter.layers.get(index), spec, geometry))
        content = HostBytes.of(draft.content())
        runs = HostBytes.of(np.array(draft.runs, dtype=np.int64).reshape(-1, len(Run._fields)))
        facts = replace(adapter.facts, nbytes=content.nbytes + runs.nbytes)
        return PackedAdapter(facts=facts, content=content, runs=runs)


class _Draft:
    """Runs as they are found, and what is to be written for them."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._writes: list[tuple[int, Piece | Array]] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._end = 0

    def add_piece(self, layer: int, piece: Piece, pitch: int) -> None:
        """``piece`` goes to its slab of ``layer``, which has an expert every ``pitch`` bytes."""
        packed = piece.packed
        place = self._places.get(packed.identity)
        if place is None:
            place = self._places[packed.identity] = self._take(packed.num_experts * packed.expert_bytes, piece)
        offset = piece.offset + piece.first_expert * pitch
        self.runs.append(Run(layer, SLABS.index(piece.slab), offset, place, packed.expert_bytes, packed.num_experts))

    def add_table(self, layer: int, table: Array) -> None:
        """``table`` is that of the slot in ``layer``."""
        self.runs.append(Run(layer, TABLES, 0, self._take(table.nbytes, table), table.nbytes, 1))

    def content(self) -> Array:
        """All bytes, uint8, zero where nothing lies."""
        content = _zeros(self._end)
        for place, source in self._writes:
            if isinstance(source, Piece):
                packed = source.packed
                size = packed.num_experts * packed.expert_bytes
                packed.write(content[place : place + size].reshape(packed.num_experts, packed.expert_bytes))
            else:
                content[place : place + source.nbytes] = source.view(np.uint8)
        return content

    def _take(self, num_bytes: int, source: Piece | Array) -> int:
        place = self._end
        self._writes.append((place, source))
        self._end = round_up(place + num_bytes, ALIGNMENT)
        return place


def _zeros(num_bytes: int) -> Array:
    """Bytes whose pages are there already: to meet them one by one takes four times as long as to pack.

    Raises ``MemoryError``.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except OSError as error:
        raise MemoryError(f"the host has no room for an adapter of {num_bytes} bytes") from error
    return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
