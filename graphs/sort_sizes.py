"""What a block of each sort needs of shared memory, and how many blocks there are."""

from dataclasses import dataclass

from ..layer.layout import round_up
from .gemm_config import MOST_SHARED_BYTES

SORT_WARPS = 16
"""Warps of a block."""
NARROW_SHARE, NARROW_ROWS = 128, 1 << 14
"""Slot rows that a block of ``narrow_sort`` places, and the most that it can count."""
WIDE_SORT_CLUSTERS, WIDE_SORT_BLOCKS = 4, 8
"""Clusters of ``wide_sort``, and blocks of each, which rank a share of the slot rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortSizes:
    """A sort of ``slot_rows`` by ``keys``, an expert and an adapter slot or none, among ``experts``. Sizes in bytes."""

    slot_rows: int
    experts: int
    keys: int

    @property
    def any_bytes(self) -> int:
        """Of ``sort``: counters of experts and their buckets, and a 16-bit key a slot row."""
        return 4 * (32 + 3 * self.experts + self.keys) + 2 * self.slot_rows

    @property
    def narrow_bytes(self) -> int:
        """Of ``narrow_sort``: no keys, but the buckets' counters twice, and each expert's first tile."""
        return 4 * (32 + 4 * self.experts + 2 * self.keys)

    @property
    def wide_bytes(self) -> int:
        """Of ``wide_sort``."""
        return self._wide_bytes(self.wide_tables)

    @property
    def wide_tables(self) -> int:
        """Tables of counts that a block of ``wide_sort`` has: one a warp, or one in all where so many would not fit."""
        return SORT_WARPS if self._wide_bytes(SORT_WARPS) <= MOST_SHARED_BYTES else 1

    @property
    def key_bits(self) -> int:
        """Bits that tell keys apart, and all of them from a row that has none."""
        return self.keys.bit_length()

    def _wide_bytes(self, tables: int) -> int:
        """The buckets' counters twice, ``tables`` of 16 bits by bucket and, if there are several, their sum, a word for
        each row of the block's share, and each expert's first tile."""
        quads = -(-self.keys // 4)
        run = round_up(-(-self.slot_rows // (WIDE_SORT_BLOCKS * SORT_WARPS)), 32)
        return 8 * quads * (4 + tables + (tables > 1)) + 4 * (32 + 4 * self.experts + SORT_WARPS * run)
