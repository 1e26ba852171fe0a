"""How GEMMs are compiled: the tiles that there are kernels for, their rings, and the shared memory that they take."""

from dataclasses import dataclass
from typing import Protocol

from ..layer.layout import BLOCK_K, round_up

RANK_BLOCK = 8
"""Ranks are stored and read in blocks of this."""
RANK_BLOCKS = 2
"""Blocks of ranks that one block of a shrink takes."""
SHRINK_THREADS = 128
"""Threads of a block that shrink beside both products."""
EXCLUSIVE_BYTES = 114 << 10
"""Shared memory that keeps a second GEMM block off an SM: two on one would leave another idle."""
LORA_ENTRIES, FEWER_ENTRIES = 8, 5
"""Blocks of ranks that one LoRA stage of a GEMM holds, and that of an expert MLP of ``LORA_TILE``."""
TOKEN_TILES = (8, 16, 32, 64, 128)
"""Tokens that one tile of a grouped GEMM can hold; the kernel is specialised for each."""
MLP_TILES = TOKEN_TILES[:4]
"""Those for which an expert MLP exists whose threads have equally many registers: wider ones need more."""
LORA_TILE = 80
"""One more for which there is one with adapters; without, tiles have two halves: ``halved_config``."""
FEW_TILE = TOKEN_TILES[0]
"""The one for which an expert MLP exists that sorts for itself and holds all hidden states, of as many tokens at most;
halved row tiles are for it alone."""
STAGES = {False: {8: 12, 16: 12, 32: 11, 64: 9, 128: 6}, True: {8: 6, 16: 6, 32: 6, 64: 6, 80: 6, 128: 4}}
"""Stages of a ring, without and with LoRA, by the tokens of a tile. Six keep 96 KiB of weights in flight on every SM.
Without LoRA there are more where there is room, which bridge the time until the first tokens come and that in which a
tile leaves; with LoRA more gained nothing."""
DIRECT_STAGES = 6
"""The same where hidden states of few tokens lie in shared memory too."""
WIDE_PIECE = 64
"""Tokens of a down tile that leave it together."""
WIDE_LORA_WARPS = 3
"""Warps of a wide GEMM with LoRA that bring B and h, a stage each in turn, unless an item has more than the ring."""
ANNOUNCEMENT_BYTES = 2 * (8 + 8 + 4)
"""Shared memory by which a thread of a GEMM tells other warps which items are next."""
WIDE_TILES = (128, 160, 256)
"""Tokens that one tile of a wide GEMM can hold; the kernel is specialised for each."""
WIDE_STAGES = {128: 6, 160: 5, 256: 4}
"""Stages of its ring: as many as there is shared memory for."""
MOST_SHARED_BYTES = 227 << 10
"""Shared memory that one block may take on compute capability 9.0."""


class DirectLayer(Protocol):
    """What a direct kernel's shared memory depends on: see ``Geometry``."""

    @property
    def hidden_blocks(self) -> int: ...

    @property
    def direct_plan_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How a grouped GEMM is compiled: rows and tokens of a tile, stages of its ring, whether it is ``direct`` (of few
    tokens as they came) or ``wide`` (of many, in clusters), and ``halves`` of a tile, each of ``max_n`` tokens."""

    block_m: int
    max_n: int
    stages: int
    direct: bool = False
    wide: bool = False
    halves: int = 1

    @property
    def tile_rows(self) -> int:
        """Tokens of a tile at the most."""
        return self.max_n * self.halves

    @property
    def lora_entries(self) -> int:
        """Blocks of ranks that a LoRA stage holds: fewer where there is no room for more."""
        return FEWER_ENTRIES if self.max_n == LORA_TILE else LORA_ENTRIES

    @property
    def cluster(self) -> int:
        """Blocks that share a token tile."""
        return 2 if self.wide else 1

    @property
    def rank_blocks(self) -> int:
        """Blocks of ranks that a shrink of an expert MLP takes at once: one of few tokens, for there are few parts."""
        return 1 if self.direct else RANK_BLOCKS

    def threads(self, *, lora: bool, mlp: bool = False) -> int:
        """Threads of a block: two for each weight row, a producing warp, with ``lora`` one more, or three where it is
        wide, and in an expert ``mlp`` one that signals, one for each half that gathers, unless ``direct``, and with
        ``lora`` four that shrink."""
        if self.wide:
            return 2 * self.block_m + 32 * (1 + WIDE_LORA_WARPS * lora)
        producers = 1 + lora + mlp + self.halves * (mlp and not self.direct)
        return 2 * self.block_m + 32 * producers + (SHRINK_THREADS if lora and mlp else 0)

    def shared_bytes(self, *, staging: bool, lora_projections: int = 0, direct_for: DirectLayer | None = None) -> int:
        """Dynamic shared memory of a block; ``staging`` where the epilogue makes activations, ``lora_projections``
        (2 for gate_up, 1 for down) where it adds the LoRA delta, ``direct_for`` the layer of a direct one."""
        if self.wide:
            return self._wide_shared_bytes(staging=staging)
        token_bytes = round_up(self.max_n * BLOCK_K * 2, 1024)
        stage_bytes = self.block_m * BLOCK_K * 2 + token_bytes
        needed = self.stages * stage_bytes + (token_bytes if staging else 0)
        if direct_for is not None:
            needed += direct_for.hidden_blocks * token_bytes
            needed += direct_for.direct_plan_bytes
        if lora_projections:
            h_blocks = 4 if self.max_n > 64 else 8
            fragments = self.lora_entries * self.block_m // 16 * 256
            needed += 2 * (fragments + h_blocks * self.max_n * lora_projections * RANK_BLOCK * 2)
        ring_bytes = self.stages * (8 + 8 + 4)
        lora_ring_bytes = 2 * (8 + 8 + 8 + 8 + 4 + 4 + 4 + self.lora_entries * 8)
        rings = (ring_bytes, lora_ring_bytes, ANNOUNCEMENT_BYTES, ANNOUNCEMENT_BYTES + 8)
        return max(needed + sum(round_up(each, 16) for each in rings), EXCLUSIVE_BYTES)

    def _wide_shared_bytes(self, *, staging: bool) -> int:
        stage_bytes = (self.block_m + self.max_n) * BLOCK_K * 2
        staging_bytes = self.max_n * BLOCK_K if staging else 2 * WIDE_PIECE * BLOCK_K * 2
        sent = self.stages + 2
        ring_bytes = 8 * (2 * self.stages + sent) + (16 + 4 + 8) * self.stages + 4 * sent + 2 * ANNOUNCEMENT_BYTES
        return self.stages * stage_bytes + 2 * staging_bytes + round_up(ring_bytes, 16)


def wide_config(tile: int) -> GemmConfig:
    """The configuration of the wide GEMM for token tiles of ``tile``."""
    return GemmConfig(block_m=128, max_n=tile, stages=WIDE_STAGES[tile], wide=True)


def tile_of(num_tokens: int) -> int:
    """The smallest of ``TOKEN_TILES`` that holds ``num_tokens``, or the largest there is."""
    return next((tile for tile in TOKEN_TILES if tile >= num_tokens), TOKEN_TILES[-1])


def gemm_config(tile: int, *, lora: bool = False, direct: bool = False) -> GemmConfig:
    """The configuration for token tiles of ``tile``."""
    return GemmConfig(128, tile, DIRECT_STAGES if direct else STAGES[lora][tile], direct=direct)


def deep_config() -> GemmConfig:
    """That of a direct expert MLP without LoRA where hidden states leave room for a longer ring."""
    return GemmConfig(128, FEW_TILE, stages=9, direct=True)


def halved_config() -> GemmConfig:
    """That of an expert MLP of many tokens without LoRA: tiles have two halves, so that weights are brought once for
    both. Of few tokens the smaller kernel is the faster one."""
    tile = MLP_TILES[-1]
    return GemmConfig(128, tile, STAGES[False][tile], halves=2)


def few_config() -> GemmConfig:
    """That of an expert MLP with halved row tiles, and as many bytes in flight. Alone it is the better one: where every
    multiprocessor has a whole tile anyway, its smaller copies cost bandwidth."""
    return GemmConfig(block_m=64, max_n=FEW_TILE, stages=12, direct=True)
