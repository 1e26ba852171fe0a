"""An adapter's part of a layer as the kernels read it: views of its tensors, laid out anew where they are copied to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layer.adapter import LayerAdapter, LoraWeights
from ..layer.layout import round_up
from ..layer.spec import LayerSpec
from .buffers import LORA_ENTRY
from .gemm_config import RANK_BLOCK
from .geometry import Geometry

SHRINK_K = 32
"""Elements of K that one fragment of A holds for eight ranks."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Packed:
    """What the kernels read, ``[E, …]``, not laid out yet: views of one shape and dtype, interleaved by element.

    An element is a bf16, or two that stay beside each other.
    """

    views: tuple[Array, ...]

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.views[0].shape[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        first = self.views[0]
        return len(self.views) * first.itemsize * int(np.prod(first.shape[1:], dtype=np.int64))

    @property
    def identity(self) -> tuple[int, ...]:
        """What no other has that is laid out from other memory, or otherwise."""
        return tuple(
            part for view in self.views for part in (view.__array_interface__["data"][0], *view.shape, *view.strides)
        )

    def write(self, target: Array) -> None:
        """Lay it out in ``target``, bytes ``[E, expert_bytes]``; numpy does so several times as fast as torch."""
        places = target.view(self.views[0].dtype).reshape(*self.views[0].shape, len(self.views))
        for index, view in enumerate(self.views):
            np.copyto(places[..., index], view)

    def tensor(self) -> Tensor:
        """All of it, bf16 ``[E, elements]``, in memory of its own."""
        target = np.empty((self.num_experts, self.expert_bytes), dtype=np.uint8)
        self.write(target)
        return torch.from_numpy(target).view(torch.bfloat16)


def pack_a(a: Tensor, k_stride: int) -> Packed:
    """``a`` bf16 ``[E, r, K]`` as the shrink kernel reads it: ``[E, r/8, K/32, 8, 32]``, padded with zeros."""
    experts, rank, _ = a.shape
    padded = _padded(a, (experts, round_up(rank, RANK_BLOCK), k_stride))
    blocks = padded.reshape(experts, -1, RANK_BLOCK, k_stride // SHRINK_K, SHRINK_K)
    return Packed((blocks.transpose(0, 1, 3, 2, 4),))


def pack_b_down(b: Tensor, features: int) -> Packed:
    """``b`` bf16 ``[E, H, r]`` as fragments of m16n8k8: ``[E, r/8, features/16, 8, 4, 2, 2]``.

    Rows i and i + 8 of block n are output features ``32 * (n // 2) + 4 * i + 2 * (n % 2)`` and the next, as in the
    accumulators of the down GEMM; a lane (i, c) holds ranks 2c and 2c + 1 of both.
    """
    experts, _, rank = b.shape
    pairs = _rank_pairs(b, (experts, features, round_up(rank, RANK_BLOCK)))
    blocks = pairs.reshape(experts, features // 32, 8, 2, 2, -1, 4)
    return Packed((blocks.transpose(0, 5, 1, 3, 2, 6, 4),))


def pack_b_gate_up(gate: Tensor | None, up: Tensor | None, features: int) -> Packed:
    """``gate`` and ``up`` bf16 ``[E, I, r]`` as fragments: ``[E, r/8, features/8, 8, 4, 2, 2]``, up before gate.

    Block b holds features ``16 * (b // 2) + 2 * i + b % 2``: rows i are their up, rows i + 8 their gate, as in the
    accumulators of the gate_up GEMM. Where one of them is missing it counts as zero; their ranks may differ.
    """
    there = [tensor for tensor in (gate, up) if tensor is not None]
    experts, rank = len(there[0]), max(tensor.shape[2] for tensor in there)

    def blocks(b: Tensor | None) -> Array:
        shape = (experts, features, round_up(rank, RANK_BLOCK))
        pairs = np.broadcast_to(np.int32(0), (*shape[:2], shape[2] // 2)) if b is None else _rank_pairs(b, shape)
        return pairs.reshape(experts, features // 16, 8, 2, -1, 4).transpose(0, 4, 1, 3, 2, 5)

    return Packed((blocks(up), blocks(gate)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A packed tensor of several experts, and where it goes within a slab of one slot."""

    slab: str
    first_expert: int
    offset: int
    packed: Packed


def pieces(adapter: LayerAdapter, spec: LayerSpec, geometry: Geometry) -> Iterator[Piece]:
    """The packed tensors of one adapter's part of a layer."""
    local = geometry.num_local_experts
    yield from _pieces(geometry, _local(adapter, spec), 0, local)
    for index, chunk in enumerate(_shared_chunks(adapter, spec, geometry.num_shared), local):
        yield from _pieces(geometry, chunk, index, 1)


def entries(adapter: LayerAdapter | None, spec: LayerSpec, geometry: Geometry) -> Array:
    """The table of one slot, ``LORA_ENTRY`` ``[experts]``; None: an empty slot."""
    table = np.zeros(geometry.experts, dtype=LORA_ENTRY)
    if adapter is not None:
        local = geometry.num_local_experts
        _fill(table[:local], _local(adapter, spec))
        for index, chunk in enumerate(_shared_chunks(adapter, spec, geometry.num_shared), local):
            _fill(table[index : index + 1], chunk)
    return table


_Projections = tuple[LoraWeights | None, LoraWeights | None, LoraWeights | None]


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Array:
    """``tensor``, bf16, as 16-bit words, with zeros up to ``shape`` where it is smaller."""
    words: Array = tensor.view(torch.int16).numpy()
    if words.shape == shape:
        return words
    padded = np.zeros(shape, dtype=words.dtype)
    padded[tuple(slice(size) for size in words.shape)] = words
    return padded


def _rank_pairs(b: Tensor, shape: tuple[int, ...]) -> Array:
    """``b`` padded to ``shape``, of which ranks come last, two ranks in one 32-bit word."""
    padded = _padded(b, shape)
    if padded.strides[-1] != padded.itemsize or any(stride % 4 for stride in padded.strides[:-1]):
        padded = np.ascontiguousarray(padded)
    return padded.view(np.int32)


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
            yield Piece("lora_a_gate_up", first, offset, pack_a(weights.a, geometry.hidden_stride))
    if gate is not None or up is not None:
        b_gate, b_up = (None if each is None else each.b.expand(count, -1, -1) for each in (gate, up))
        yield Piece("lora_b_gate_up", first, 0, pack_b_gate_up(b_gate, b_up, geometry.intermediate_stride))
    if down is not None:
        a = down.a.expand(count, -1, -1)
        yield Piece("lora_a_down", first, 0, pack_a(a, geometry.intermediate_stride))
        yield Piece("lora_b_down", first, 0, pack_b_down(down.b, geometry.output_stride))


def _fill(table: Array, projections: _Projections) -> None:
    for index, weights in enumerate(projections):
        if weights is None:
            continue
        table["rank"][:, index] = weights.ranks.numpy()
        table["scaling"][:, index] = weights.scaling.numpy()
        if len(table) > 1 and index < 2 and weights.a.shape[0] == 1:
            table["shared_a"] |= 1 << index
        if len(table) > 1 and index == 2 and weights.b.shape[0] == 1:
            table["shared_b"] = 1
