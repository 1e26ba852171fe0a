"""Adapter slots on the GPU: fixed addresses for every layer, filled from packed host copies by the copy stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..layer.adapter import Adapter, LayerAdapter, LoraWeights
from ..layer.errors import AdapterRefusedError
from ..layer.layout import round_up
from ..layer.spec import LayerSpec
from .buffers import LAYER_ARGS, LORA_ENTRY
from .geometry import RANK_BLOCK, Geometry
from .memory import DeviceBuffer, PinnedBuffer, copy_rows_to_device
from .streams import Stream

SHRINK_K = 32
"""Elements of K that one fragment of A holds for eight ranks."""
STAGING_BYTES = 32 << 20
"""Pinned memory that adapters pass through: a chunk of this size at a time, so that a swap never holds the bus long."""


@dataclass(frozen=True, slots=True)
class Slab:
    """One tensor of a slot: where it starts in the layer's memory, and bytes from one expert to the next."""

    name: str
    expert_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Packed bytes of several experts, ``[experts, bytes]``, and where they go within a slab of one slot."""

    slab: str
    first_expert: int
    offset: int
    data: Tensor


def pack_a(a: Tensor, k_stride: int) -> Tensor:
    """``a`` bf16 ``[E, r, K]`` as the shrink kernel reads it: ``[E, r/8, K/32, 8, 32]``, padded with zeros."""
    experts, rank, k = a.shape
    padded = a.new_zeros(experts, round_up(rank, RANK_BLOCK), k_stride)
    padded[:, :rank, :k] = a
    return padded.view(experts, -1, RANK_BLOCK, k_stride // SHRINK_K, SHRINK_K).transpose(2, 3).contiguous()


def pack_b_down(b: Tensor, features: int) -> Tensor:
    """``b`` bf16 ``[E, H, r]`` as fragments of m16n8k8: ``[E, r/8, features/16, 8, 4, 2, 2]``.

    Rows i and i + 8 of block n are output features ``32 * (n // 2) + 4 * i + 2 * (n % 2)`` and the next, as in the
    accumulators of the down GEMM; a lane (i, c) holds ranks 2c and 2c + 1 of both.
    """
    experts, out, rank = b.shape
    padded = b.new_zeros(experts, features, round_up(rank, RANK_BLOCK))
    padded[:, :out, :rank] = b
    blocks = padded.view(experts, features // 32, 8, 2, 2, -1, 4, 2)
    return blocks.permute(0, 5, 1, 3, 2, 6, 4, 7).contiguous()


def pack_b_gate_up(gate: Tensor, up: Tensor, features: int) -> Tensor:
    """``gate`` and ``up`` bf16 ``[E, I, r]`` as fragments: ``[E, r/8, features/8, 8, 4, 2, 2]``, up before gate.

    Block b holds features ``16 * (b // 2) + 2 * i + b % 2``: rows i are their up, rows i + 8 their gate, as in the
    accumulators of the gate_up GEMM.
    """
    experts, out, rank = gate.shape
    padded = gate.new_zeros(experts, 2, features, round_up(rank, RANK_BLOCK))
    padded[:, 0, :out, :rank] = up
    padded[:, 1, :out, :rank] = gate
    blocks = padded.view(experts, 2, features // 16, 8, 2, -1, 4, 2)
    return blocks.permute(0, 5, 2, 4, 3, 6, 1, 7).contiguous()


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
        self._entries.write(torch.zeros(self._entry_bytes * geometry.max_loras, dtype=torch.uint8))

    @property
    def num_bytes(self) -> int:
        """GPU bytes of all slots of the layer."""
        return self._entries.num_bytes + sum(buffer.num_bytes for buffer in self._memory.values())

    def fill_args(self, args: "np.ndarray[tuple[()], np.dtype[np.void]]") -> None:
        """Write the slots' addresses into a layer's head."""
        assert args.dtype == LAYER_ARGS
        for name, buffer in self._memory.items():
            args[name] = buffer.pointer
        args["lora"] = self._entries.pointer

    def pieces(self, adapter: LayerAdapter) -> Iterator[Piece]:
        """The packed tensors of one adapter's part of this layer."""
        geometry, local = self.geometry, self.geometry.num_local_experts
        yield from _pieces(geometry, _local(adapter, self.spec), 0, local)
        for index, chunk in enumerate(_shared_chunks(adapter, self.spec, geometry.num_shared), local):
            yield from _pieces(geometry, chunk, index, 1)

    def entries(self, adapter: LayerAdapter | None) -> Tensor:
        """The table of one slot, ``[experts]`` of ``LORA_ENTRY``, as bytes; None: an empty slot."""
        table = np.zeros(self.geometry.experts, dtype=LORA_ENTRY)
        if adapter is not None:
            local = self.geometry.num_local_experts
            _fill(table[:local], _local(adapter, self.spec))
            for index, chunk in enumerate(_shared_chunks(adapter, self.spec, self.geometry.num_shared), local):
                _fill(table[index : index + 1], chunk)
        return torch.from_numpy(table.view(np.uint8))

    def copy_piece(self, slot: int, piece: Piece, staging: PinnedBuffer, stream: Stream) -> None:
        """Copy one piece to ``slot`` through ``staging``, in chunks, waiting for each."""
        slab = self._slabs[piece.slab]
        width = piece.data.shape[1]
        step = max(staging.num_bytes // width, 1)
        first = self._memory[piece.slab].pointer + slot * slab.slot_bytes + piece.offset
        for start in range(0, piece.data.shape[0], step):
            part = piece.data[start : start + step]
            staging.tensor(torch.uint8, tuple(part.shape)).copy_(part)
            target = first + (piece.first_expert + start) * slab.expert_bytes
            copy_rows_to_device(target, slab.expert_bytes, staging.pointer, width, width, part.shape[0], stream)
            stream.synchronize()

    def write_entries(self, slot: int, table: Tensor, staging: PinnedBuffer, stream: Stream) -> None:
        """Publish a slot's table, which is what makes its adapter live or the slot empty."""
        staging.tensor(torch.uint8, tuple(table.shape)).copy_(table)
        target = self._entries.pointer + slot * self._entry_bytes
        copy_rows_to_device(target, self._entry_bytes, staging.pointer, self._entry_bytes, self._entry_bytes, 1, stream)
        stream.synchronize()

    def close(self) -> None:
        """Free the slots."""
        self._entries.close()
        for buffer in self._memory.values():
            buffer.close()


class SlotBank:
    """All layers' slots and the staging memory that fills them, over the copy stream."""

    def __init__(self, layers: Mapping[int, AdapterSlots], max_lora_rank: int, stream: Stream) -> None:
        self._layers = layers
        self._max_lora_rank = max_lora_rank
        self._stream = stream
        self._staging = PinnedBuffer(STAGING_BYTES)
        self._filled: set[int] = set()

    def install(self, slot: int, adapter: Adapter) -> None:
        """Replace what ``slot`` holds, whole; no forward may be using it, others may run meanwhile.

        The slot is empty while it is written, through the copy stream alone, which alone is waited for; one call at a
        time. Raises ``AdapterRefusedError`` for a rank beyond the slots'.
        """
        if adapter.max_rank > self._max_lora_rank:
            raise AdapterRefusedError("r", f"a rank of at most {self._max_lora_rank}", str(adapter.max_rank))
        self.remove(slot)
        self._filled.add(slot)
        for index, layer in self._layers.items():
            part = adapter.layers.get(index)
            if part is None:
                continue
            for piece in layer.pieces(part):
                layer.copy_piece(slot, piece, self._staging, self._stream)
        for index, layer in self._layers.items():
            layer.write_entries(slot, layer.entries(adapter.layers.get(index)), self._staging, self._stream)

    def remove(self, slot: int) -> None:
        """Empty ``slot``; an empty one is left as it is."""
        if slot not in self._filled:
            return
        for layer in self._layers.values():
            layer.write_entries(slot, layer.entries(None), self._staging, self._stream)
        self._filled.discard(slot)

    def close(self) -> None:
        """Free the staging memory and the slots."""
        self._staging.close()
        for layer in self._layers.values():
            layer.close()


_Projections = tuple[LoraWeights | None, LoraWeights | None, LoraWeights | None]


def _local(adapter: LayerAdapter, spec: LayerSpec) -> _Projections:
    experts = slice(spec.local_expert_offset, spec.local_expert_end)

    def slice_of(weights: LoraWeights | None) -> LoraWeights | None:
        if weights is None:
            return None
        a = weights.a if weights.a.shape[0] == 1 else weights.a[experts]
        b = weights.b if weights.b.shape[0] == 1 else weights.b[experts]
        return LoraWeights(a=a, b=b, scaling=weights.scaling[experts], ranks=weights.ranks[experts])

    return slice_of(adapter.gate), slice_of(adapter.up), slice_of(adapter.down)


def _shared_chunks(adapter: LayerAdapter, spec: LayerSpec, num_shared: int) -> list[_Projections]:
    """The shared experts' projections by chunks of the routed width: gate and up rows of B, down columns of A."""
    inter = spec.intermediate_size

    def rows(weights: LoraWeights | None, start: int) -> LoraWeights | None:
        if weights is None:
            return None
        return LoraWeights(
            a=weights.a, b=weights.b[:, start : start + inter], scaling=weights.scaling, ranks=weights.ranks
        )

    def columns(weights: LoraWeights | None, start: int) -> LoraWeights | None:
        if weights is None:
            return None
        return LoraWeights(
            a=weights.a[:, :, start : start + inter], b=weights.b, scaling=weights.scaling, ranks=weights.ranks
        )

    starts = range(0, num_shared * inter, inter)
    return [(rows(adapter.shared_gate, s), rows(adapter.shared_up, s), columns(adapter.shared_down, s)) for s in starts]


def _pieces(geometry: Geometry, projections: _Projections, first: int, count: int) -> Iterator[Piece]:
    gate, up, down = projections
    half = geometry.slab_bytes["lora_a_gate_up"] // 2
    for offset, weights in ((0, gate), (half, up)):
        if weights is not None:
            yield _piece("lora_a_gate_up", first, offset, pack_a(weights.a, geometry.hidden_stride))
    if gate is not None or up is not None:
        b_gate, b_up = _paired(gate, up, count)
        yield _piece("lora_b_gate_up", first, 0, pack_b_gate_up(b_gate, b_up, geometry.intermediate_stride))
    if down is not None:
        a = down.a.expand(count, -1, -1)
        yield _piece("lora_a_down", first, 0, pack_a(a, geometry.intermediate_stride))
        yield _piece("lora_b_down", first, 0, pack_b_down(down.b, geometry.output_stride))


def _paired(gate: LoraWeights | None, up: LoraWeights | None, count: int) -> tuple[Tensor, Tensor]:
    """B of gate and up for ``count`` experts at one rank, zero where there is none."""
    present = [weights.b.expand(count, -1, -1) for weights in (gate, up) if weights is not None]
    rank = max(b.shape[2] for b in present)

    def at_rank(weights: LoraWeights | None) -> Tensor:
        padded = present[0].new_zeros(count, present[0].shape[1], rank)
        if weights is not None:
            padded[:, :, : weights.rank] = weights.b
        return padded

    return at_rank(gate), at_rank(up)


def _piece(slab: str, first: int, offset: int, packed: Tensor) -> Piece:
    return Piece(slab, first, offset, packed.view(torch.uint8).reshape(packed.shape[0], -1))


def _fill(table: "np.ndarray[tuple[int], np.dtype[np.void]]", projections: _Projections) -> None:
    for index, weights in enumerate(projections):
        if weights is None:
            continue
        table["rank"][:, index] = weights.ranks.numpy()
        table["scaling"][:, index] = weights.scaling.numpy()
        if len(table) > 1 and index < 2 and weights.a.shape[0] == 1:
            table["shared_a"] |= 1 << index
        if len(table) > 1 and index == 2 and weights.b.shape[0] == 1:
            table["shared_b"] = 1
