"""BlockMajorK: the order in which expert weights lie in memory, packed and unpacked bit for bit.

A bf16 matrix ``[E, N, K]`` is stored ``[E, K/64, N, 64]``: blocks of 64 elements (128 bytes) of K are
outermost, so that any run of rows of one block is contiguous memory. K is padded with zeros to a
multiple of 64 and N to a multiple of ``row_tile``. This is FlashInfer's ``WeightLayout.BlockMajorK``.

Row order (also FlashInfer's, its ``epilogue_tile_m = 128``): gate_up goes through three steps, swap to
``[up; gate]``, interleave the halves, shuffle each 32 rows (row ``i`` of 32 is stored at
``8*(i%4) + i//4``); down goes through the shuffle alone. What it buys: with weights as the M operand,
lane ``l`` of an ``m16n8k16`` (or of one warp of an ``m64nNk16``) accumulator owns rows ``l//4`` and
``l//4 + 8``. Of gate_up those are the up and the gate of one feature, so the activation is
register-local; of down they are output features ``2q`` and ``2q + 1``, one bf16x2.

Swizzled: within each 128-byte row ``n``, the 16-byte chunk ``c`` is stored at chunk ``c ^ (n % 8)``, as
a 128-byte-swizzled tensor map would leave it in shared memory, so that plain bulk copies will do.

Only rows are permuted: the columns of down are features in plain order, and so are activations.
Padding of the weights is zero, yet 0 * NaN is NaN: activations must be finite there, best zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_K = 64
"""Elements of K in a block: 128 bytes of bf16."""
ROW_TILE = 64
"""Rows are padded to a multiple of this unless said otherwise: one ``m64`` tile."""
SHUFFLE_ROWS = 32
"""Rows that the shuffle of the row order stays within."""
SWIZZLE_ROWS = 8
"""Rows after which the swizzle repeats; also the number of chunks in a row."""
CHUNK = BLOCK_K // SWIZZLE_ROWS
"""Elements in a 16-byte chunk."""

_STEP_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Sizes and addresses of matrices ``[n, k]`` in BlockMajorK, in elements of 2 bytes.

    ``row_tile`` must be a multiple of 8, the swizzle's period. Raises ``ValueError`` otherwise.
    """

    n: int
    k: int
    row_tile: int = ROW_TILE

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"a packed matrix needs at least one row and column, got {self.n} x {self.k}")
        if self.row_tile < 1 or self.row_tile % SWIZZLE_ROWS:
            raise ValueError(f"row_tile must be a multiple of {SWIZZLE_ROWS}, got {self.row_tile}")

    @property
    def padded_n(self) -> int:
        """Rows stored."""
        return round_up(self.n, self.row_tile)

    @property
    def padded_k(self) -> int:
        """Columns stored."""
        return round_up(self.k, BLOCK_K)

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 columns."""
        return self.padded_k // BLOCK_K

    @property
    def expert_numel(self) -> int:
        """Elements from one expert's matrix to the next."""
        return self.padded_n * self.padded_k

    def shape(self, num_experts: int) -> tuple[int, int, int, int]:
        """``[E, K/64, N_padded, 64]``."""
        return num_experts, self.k_blocks, self.padded_n, BLOCK_K

    def nbytes(self, num_experts: int) -> int:
        """Bytes of ``num_experts`` bf16 matrices."""
        return 2 * num_experts * self.expert_numel

    def offset(self, expert: int, row: int, k: int, *, swizzled: bool = False) -> int:
        """Where element ``(row, k)`` of ``expert`` lies, in elements from the first; ``row`` is a stored row."""
        chunk, within = divmod(k % BLOCK_K, CHUNK)
        if swizzled:
            chunk ^= row % SWIZZLE_ROWS
        line = (expert * self.k_blocks + k // BLOCK_K) * self.padded_n + row
        return line * BLOCK_K + chunk * CHUNK + within


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def gate_up_row_order(intermediate_size: int, *, row_tile: int = SHUFFLE_ROWS) -> Tensor:
    """For each stored row of gate_up, the row of ``[gate; up]`` that it holds, int64 ``[2I_padded]``.

    Stored row ``n = 32b + 8g + j`` holds feature ``16b + 2j + g//2``: its gate where ``g`` is odd, its
    up where ``g`` is even. I is padded to a multiple of 16 features (``2I`` to ``row_tile``, a multiple
    of 32); -1 marks the rows of features that are padding, which are stored as zeros.
    """
    n = torch.arange(round_up(2 * intermediate_size, _shuffle_tile(row_tile)))
    group, j = n % SHUFFLE_ROWS // 8, n % 8
    feature = 16 * (n // SHUFFLE_ROWS) + 2 * j + group // 2
    source = torch.where(group % 2 == 1, feature, feature + intermediate_size)
    return source.masked_fill_(feature >= intermediate_size, -1)


def gate_up_stored_rows(intermediate_size: int) -> Tensor:
    """For each row of ``[gate; up]``, the stored row that holds it, int64 ``[2I]``; inverts ``gate_up_row_order``.

    Feature ``16b + t`` has its up at stored row ``32b + 16*(t%2) + t//2`` and its gate 8 rows further.
    """
    feature = torch.arange(intermediate_size)
    t = feature % 16
    up = SHUFFLE_ROWS * (feature // 16) + 16 * (t % 2) + t // 2
    return torch.cat((up + 8, up))


def down_row_order(hidden_size: int, *, row_tile: int = SHUFFLE_ROWS) -> Tensor:
    """For each stored row of down, the output feature that it holds, int64 ``[H_padded]``; -1 is padding.

    Stored row ``n`` holds output feature ``32*(n//32) + 4*(n%8) + (n%32)//8``.
    """
    n = torch.arange(round_up(hidden_size, _shuffle_tile(row_tile)))
    source = SHUFFLE_ROWS * (n // SHUFFLE_ROWS) + 4 * (n % 8) + n % SHUFFLE_ROWS // 8
    return source.masked_fill_(source >= hidden_size, -1)


def down_stored_rows(hidden_size: int) -> Tensor:
    """For each output feature, the stored row of down that holds it, int64 ``[H]``; inverts ``down_row_order``."""
    feature = torch.arange(hidden_size)
    i = feature % SHUFFLE_ROWS
    return feature - i + 8 * (i % 4) + i // 4


def _shuffle_tile(row_tile: int) -> int:
    if row_tile < 1 or row_tile % SHUFFLE_ROWS:
        raise ValueError(f"row_tile must be a multiple of {SHUFFLE_ROWS} for shuffled rows, got {row_tile}")
    return row_tile


def block_major_k(w: Tensor, *, row_tile: int = ROW_TILE, swizzled: bool = False, out: Tensor | None = None) -> Tensor:
    """Pack ``w``, bf16 ``[E, N, K]``, rows in their own order, into ``[E, ceil(K/64), N_padded, 64]``.

    ``out``, when given, is written whole, padding included, and may lie on another device: ``w`` then
    moves there a few experts at a time. Raises ``ValueError`` when a dtype or shape is wrong.
    """
    return _pack(w, None, row_tile, swizzled, out)


def from_block_major_k(packed: Tensor, n: int, k: int, *, swizzled: bool = False, out: Tensor | None = None) -> Tensor:
    """The bf16 ``[E, n, k]`` that ``block_major_k`` packed into ``packed``; ``out`` as there."""
    return _unpack(packed, None, n, k, swizzled, out)


def pack_gate_up(
    gate_up: Tensor, *, row_tile: int = ROW_TILE, swizzled: bool = False, out: Tensor | None = None
) -> Tensor:
    """Pack ``gate_up``, bf16 ``[E, 2I, H]`` (gate rows first), into ``[E, ceil(H/64), 2I_padded, 64]``.

    Rows lie as ``gate_up_row_order`` says; ``row_tile`` must be a multiple of 32; ``out`` as in ``block_major_k``.
    """
    _expect(gate_up, 3, "gate_up")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even number of rows, got {gate_up.shape[1]}")
    stored_rows = gate_up_stored_rows(gate_up.shape[1] // 2)
    return _pack(gate_up, stored_rows, _shuffle_tile(row_tile), swizzled, out)


def unpack_gate_up(
    packed: Tensor, intermediate_size: int, hidden_size: int, *, swizzled: bool = False, out: Tensor | None = None
) -> Tensor:
    """The bf16 ``[E, 2I, H]``, gate rows first, that ``pack_gate_up`` packed; ``out`` as in ``block_major_k``."""
    stored_rows = gate_up_stored_rows(intermediate_size)
    return _unpack(packed, stored_rows, 2 * intermediate_size, hidden_size, swizzled, out)


def pack_down(down: Tensor, *, row_tile: int = ROW_TILE, swizzled: bool = False, out: Tensor | None = None) -> Tensor:
    """Pack ``down``, bf16 ``[E, H, I]``, into ``[E, ceil(I/64), H_padded, 64]``.

    Rows lie as ``down_row_order`` says; ``row_tile`` must be a multiple of 32; ``out`` as in ``block_major_k``.
    """
    _expect(down, 3, "down")
    return _pack(down, down_stored_rows(down.shape[1]), _shuffle_tile(row_tile), swizzled, out)


def unpack_down(
    packed: Tensor, hidden_size: int, intermediate_size: int, *, swizzled: bool = False, out: Tensor | None = None
) -> Tensor:
    """The bf16 ``[E, H, I]`` that ``pack_down`` packed; ``out`` as in ``block_major_k``."""
    return _unpack(packed, down_stored_rows(hidden_size), hidden_size, intermediate_size, swizzled, out)


def swizzle_rows(packed: Tensor) -> Tensor:
    """A copy of ``packed`` ``[..., N, 64]`` with 16-byte chunk ``c`` of row ``n`` at chunk ``c ^ (n % 8)``.

    Its own inverse. ``n`` counts within the last matrix and must be a multiple of 8.
    """
    if packed.shape[-1] != BLOCK_K or packed.shape[-2] % SWIZZLE_ROWS or packed.element_size() != 2:
        raise ValueError(f"swizzling needs 2-byte [..., 8n, {BLOCK_K}], got {packed.dtype} {list(packed.shape)}")
    atoms = packed.reshape(-1, SWIZZLE_ROWS, SWIZZLE_ROWS, CHUNK)
    row = torch.arange(SWIZZLE_ROWS, device=packed.device)
    swapped: Tensor = atoms[:, row[:, None], row[:, None] ^ row]
    return swapped.view(packed.shape)


def _pack(w: Tensor, stored_rows: Tensor | None, row_tile: int, swizzled: bool, out: Tensor | None) -> Tensor:
    """``stored_rows[i]`` is where row ``i`` of ``w`` goes; None keeps the order."""
    _expect(w, 3, "a matrix to pack")
    experts, n, k = w.shape
    packed = PackedShape(n, k, row_tile)
    out = _destination(out, packed.shape(experts), w.device)
    rows = torch.arange(n) if stored_rows is None else stored_rows
    rows = rows.to(out.device)
    full = k - k % BLOCK_K
    for part in _parts(experts, packed.nbytes(1)):
        source, target = _bits(w[part]).to(out.device), _bits(out[part])
        if (n, k) != (packed.padded_n, packed.padded_k):
            target.zero_()
        by_row = target.transpose(1, 2)
        if full:
            blocks = source[:, :, :full].reshape(*source.shape[:2], -1, BLOCK_K)
            by_row[:, :, : full // BLOCK_K].index_copy_(1, rows, blocks)
        if full < k:
            by_row[:, :, -1, : k - full].index_copy_(1, rows, source[:, :, full:])
        if swizzled:
            target.copy_(swizzle_rows(target))
    return out


def _unpack(packed: Tensor, stored_rows: Tensor | None, n: int, k: int, swizzled: bool, out: Tensor | None) -> Tensor:
    _expect(packed, 4, "a packed matrix")
    experts, blocks, padded_n, block = packed.shape
    if block != BLOCK_K or blocks != -(-k // BLOCK_K) or padded_n < n:
        raise ValueError(f"a packed [{experts}, {n}, {k}] cannot have the shape {list(packed.shape)}")
    out = _destination(out, (experts, n, k), packed.device)
    rows = torch.arange(n) if stored_rows is None else stored_rows
    if n and int(rows.max()) >= padded_n:
        raise ValueError(f"{padded_n} packed rows are too few for {n} shuffled ones")
    rows = rows.to(out.device)
    for part in _parts(experts, 2 * n * k):
        source = _bits(packed[part]).to(out.device)
        if swizzled:
            source = swizzle_rows(source)
        by_row = source.index_select(2, rows).transpose(1, 2).flatten(2)
        _bits(out[part]).copy_(by_row[:, :, :k])
    return out


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that no copy can touch a NaN's payload."""
    return tensor.view(torch.int16)


def _parts(experts: int, expert_nbytes: int) -> list[slice]:
    step = max(1, _STEP_NBYTES // expert_nbytes)
    return [slice(start, start + step) for start in range(0, experts, step)]


def _expect(tensor: Tensor, ndim: int, what: str) -> None:
    if tensor.dtype != torch.bfloat16 or tensor.ndim != ndim:
        raise ValueError(f"{what} should be bf16 with {ndim} dimensions, got {tensor.dtype} {list(tensor.shape)}")


def _destination(out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    if out.dtype != torch.bfloat16 or tuple(out.shape) != shape:
        raise ValueError(f"out should be bf16 {list(shape)}, got {out.dtype} {list(out.shape)}")
    return out
