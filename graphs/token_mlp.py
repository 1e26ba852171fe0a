"""How the token MLP deals a few tokens' products to its blocks, and the shared memory that it takes."""

from dataclasses import dataclass
from math import ceil

from ..layer.layout import round_up
from .gemm_config import MOST_SHARED_BYTES
from .geometry import DIRECT_ROWS, SHRINK_BYTES, Geometry

TOKENS = 3
"""Tokens that it takes at the most: as many as it was held to the other kernels with, and measured. Its instruction has
eight columns."""
FEW_ROWS = 32
"""Slot rows that it takes at the most: one a lane of the warp that makes their tiles."""
SLICE_ROWS, SLICE_BYTES = 16, 16 * 128
"""Weight rows that one warp multiplies, and their bytes of a K-block."""
SLICES = (8, 6, 4, 2)
"""Slices that an item of gate_up can have: up to one a warp, in pairs, which are 16 consecutive features."""
WARPS = 8
"""Warps that multiply."""
MOST_HITS = 10
"""Experts that the tokens hit on average up to which it is the fastest: little more than one a warp."""
MOST_BLOCKS = 32
"""K-blocks of down up to which a warp sums an expert's by itself."""
UNEVEN = 1.1
"""How much more than with the best number of slices the busiest block may have to read: larger copies are worth it."""
STAGE_BLOCKS = 8
"""K-blocks of a slice of down that one stage of the ring holds at the most."""
LAST_BLOCKS, LAST_OF_FEW = 1, 2
"""K-blocks of the last stage of such a slice, what is left to multiply once the last weights are there: of a slice that
takes several stages anyway, and of one that could do with one."""
MOST_STAGES, LEAST_STAGES = 32, 5
SPARE_BYTES = 8 << 10
"""Shared memory left to the sort, which still runs when this kernel starts: no block waits for one to end."""
ROW_PADDING, RESULT_BYTES = 16, 32
PART_SHARES = 1 << 30
"""Enough for every number of an item: it times ``parts`` is less."""


@dataclass(frozen=True, slots=True)
class TokenMlp:
    """One shape's launch: ``slices`` of a gate_up item, ``parts`` of which make a tile; ``down_parts`` stages that a
    tile's slice of down takes, the last of ``last_blocks``; the ring and where its stages begin, bytes of hidden states
    and of activations."""

    slices: int
    parts: int
    down_parts: int
    last_blocks: int
    num_stages: int
    stage_bytes: int
    stages_offset: int
    hidden_bytes: int
    act_bytes: int

    @property
    def part_share(self) -> int:
        """What an item's number is multiplied by, and then divided by 2^30, to be divided by ``parts``."""
        return ceil(PART_SHARES / self.parts)

    @property
    def item_blocks(self) -> int:
        """K-blocks of a gate_up item that a stage holds."""
        return self.stage_bytes // (self.slices * SLICE_BYTES)

    @property
    def down_blocks(self) -> int:
        """K-blocks of a slice of down that a stage holds."""
        return self.stage_bytes // SLICE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages_offset + self.num_stages * self.stage_bytes

    @classmethod
    def of(cls, geometry: Geometry, num_tokens: int, *, lora: bool, sm_count: int) -> "TokenMlp | None":
        """That of ``num_tokens`` tokens, None where those are too many or a block has no room for them."""
        slot_rows = num_tokens * geometry.choices
        blocks = geometry.intermediate_blocks
        if num_tokens > TOKENS or slot_rows > FEW_ROWS or blocks > MOST_BLOCKS:
            return None
        if geometry.hits(num_tokens) > MOST_HITS:
            return None
        slices = _slices(geometry, num_tokens, sm_count)
        last_blocks = LAST_BLOCKS if blocks > STAGE_BLOCKS else LAST_OF_FEW
        before_last = max(blocks - last_blocks, 1)
        stage_blocks = max(slices, ceil(before_last / ceil(before_last / STAGE_BLOCKS)))
        stage_bytes = stage_blocks * SLICE_BYTES
        hidden_bytes = num_tokens * (2 * geometry.hidden_stride + ROW_PADDING)
        act_bytes = min(WARPS, slot_rows) * num_tokens * (2 * geometry.intermediate_stride + ROW_PADDING)
        beside = (
            hidden_bytes + act_bytes + geometry.rows(num_tokens) * RESULT_BYTES + 4 * DIRECT_ROWS + 16 * MOST_STAGES + 8
        )
        beside = round_up(beside + geometry.direct_plan_bytes, 1024)
        room = MOST_SHARED_BYTES - SPARE_BYTES - (SHRINK_BYTES if lora else 0) - beside
        stages = min(room // stage_bytes, MOST_STAGES)
        if stages < LEAST_STAGES:
            return None
        parts = ceil(2 * geometry.intermediate_stride / (slices * SLICE_ROWS))
        down_parts = ceil(max(blocks - last_blocks, 0) / stage_blocks) + 1
        return cls(slices, parts, down_parts, last_blocks, stages, stage_bytes, beside, hidden_bytes, act_bytes)


def _slices(geometry: Geometry, num_tokens: int, sm_count: int) -> int:
    """Slices of an item: as many as leave the busiest block little more to read than any other number would."""
    slices = 2 * geometry.intermediate_stride // SLICE_ROWS
    hits = geometry.hits(num_tokens)
    most = {each: each * ceil(hits * ceil(slices / each) / sm_count) for each in SLICES}
    return next(each for each in SLICES if most[each] <= UNEVEN * min(most.values()))
