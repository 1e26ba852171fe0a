"""The padded sizes that kernels work with, and the tile sizes chosen for a shape: pure functions of a layer's spec."""

from dataclasses import dataclass

from ..layer.layout import BLOCK_K, round_up
from ..layer.spec import LayerSpec, RoutingSpec
from .gemm_config import (
    FEW_TILE,
    LORA_TILE,
    MLP_TILES,
    MOST_SHARED_BYTES,
    RANK_BLOCK,
    WIDE_TILES,
    GemmConfig,
    deep_config,
    few_config,
    gemm_config,
    halved_config,
    tile_of,
)
from .sort_sizes import NARROW_ROWS, SortSizes

ROW_TILE = 128
"""Weight rows are padded to this, so that every row tile is whole."""
ROW_ALIGN = 8
"""An expert's permuted rows are padded to this."""
GROUP_ROWS, MLP_GROUP_ROWS, CROWD_GROUP_ROWS = 32, 8, 16
"""Rows of an adapter group at the most, but for wide GEMMs, so that several blocks shrink for one expert; where an
expert MLP takes them, as many as its warps shrink at once: more with tiles of ``LORA_TILE``."""
HALVED_ITEMS, LONE_ITEMS = 64, 128
"""Whole row tiles of gate_up up to which they are halved, and of a product that leave most blocks one at the most."""
MLP_TOKENS, MLP_ROWS = 2048, 1 << 14
"""Tokens and slot rows that an expert MLP takes at the most."""
MLP_LOAD, MANY_EXPERTS = {False: (48, 112), True: (64, 72)}, 64
"""Tokens that an expert has on average then at the most, if more than 64 are given, without adapters and with, of few
experts and of ``MANY_EXPERTS`` or more here: of those blocks have so many items that they end together."""
LORA_TILE_ABOVE = 48
"""Tokens that an expert has on average above which tiles are of ``LORA_TILE`` with adapters."""
HALVES_ABOVE = 256
"""Tokens above which its tiles have two halves, without adapters."""
SHRINK_PARTS = 4
"""Parts that a shrink of an expert MLP has at least where there are as many blocks of ranks."""
SHRINK_BYTES = 4 << 10
"""Static shared memory in which the warps that shrink beside few tokens add their sums up."""
DIRECT_ROWS = 256
"""Slot rows that such an MLP can sort."""
WIDE_ABOVE = 256
"""Tokens above which kernels of many are used: a sort by clusters, a gather by token, wide GEMMs where they pay."""
WIDE_LOAD = {False: (32, 32), True: (96, 64)}
"""Tokens that an expert should have on average for them, as ``MLP_LOAD`` tells the cases apart."""
WIDE_MARGIN = 1.3
"""Standard deviations of an expert's tokens, where routing is random, by which a tile holds more than their average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Everything a captured graph depends on but the token count: layers of equal geometry share their graphs.

    Sizes are those of ``LayerSpec``; ``max_lora_rank`` is that of the slots, a multiple of 8, 0 without slots.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    local_expert_offset: int
    top_k: int
    num_shared: int
    shared_gated: bool
    routing: RoutingSpec
    router_fp32: bool
    max_loras: int
    max_lora_rank: int

    @classmethod
    def of(cls, spec: LayerSpec, *, router_fp32: bool, max_loras: int, max_lora_rank: int) -> "Geometry":
        """The geometry of ``spec`` with adapter slots of ``max_lora_rank``, rounded up to a block of ranks."""
        return cls(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_experts=spec.num_experts,
            num_local_experts=spec.num_local_experts,
            local_expert_offset=spec.local_expert_offset,
            top_k=spec.top_k,
            num_shared=spec.num_shared_chunks,
            shared_gated=spec.shared_gated and spec.holds_shared_experts,
            routing=spec.routing,
            router_fp32=router_fp32,
            max_loras=max_loras,
            max_lora_rank=round_up(max_lora_rank, RANK_BLOCK),
        )

    @property
    def experts(self) -> int:
        """Experts in the weight tensors: the local ones, then the shared ones in chunks of the routed width."""
        return self.num_local_experts + self.num_shared

    @property
    def choices(self) -> int:
        """Slot rows of one token: ``top_k`` and one for each shared chunk."""
        return self.top_k + self.num_shared

    @property
    def hidden_blocks(self) -> int:
        """K-blocks of the gate_up GEMM."""
        return -(-self.hidden_size // BLOCK_K)

    @property
    def hidden_stride(self) -> int:
        """Elements of a row of hidden states as the kernels read them."""
        return self.hidden_blocks * BLOCK_K

    @property
    def output_stride(self) -> int:
        """Elements of a row of down outputs, and of the layer's output: whole row tiles."""
        return round_up(self.hidden_size, ROW_TILE)

    @property
    def intermediate_blocks(self) -> int:
        """K-blocks of the down GEMM; a gate_up row tile of 128 makes one."""
        return -(-self.intermediate_size // BLOCK_K)

    @property
    def intermediate_stride(self) -> int:
        """The padded width of an expert."""
        return self.intermediate_blocks * BLOCK_K

    @property
    def packed_shapes(self) -> dict[str, tuple[int, int, int]]:
        """One expert's weights in BlockMajorK, by tensor: K-blocks, rows, 64 elements of bf16."""
        return {
            "gate_up": (self.hidden_blocks, 2 * self.intermediate_stride, BLOCK_K),
            "down": (self.intermediate_blocks, self.output_stride, BLOCK_K),
        }

    @property
    def slab_bytes(self) -> dict[str, int]:
        """Bytes of one expert in one adapter slot, by tensor: bf16 at the slots' rank, gate and up together."""
        rank_bytes = 2 * self.max_lora_rank
        return {
            "lora_a_gate_up": rank_bytes * 2 * self.hidden_stride,
            "lora_b_gate_up": rank_bytes * 2 * self.intermediate_stride,
            "lora_a_down": rank_bytes * self.intermediate_stride,
            "lora_b_down": rank_bytes * self.output_stride,
        }

    def rows(self, num_tokens: int) -> int:
        """Permuted rows that ``num_tokens`` tokens can take at the most, padding included."""
        slot_rows = num_tokens * self.choices
        padding = (ROW_ALIGN - 1) * min(slot_rows, self.experts)
        return max(round_up(slot_rows + padding, ROW_ALIGN), ROW_ALIGN)

    def token_tiles(self, num_tokens: int, tile: int) -> int:
        """Token tiles that ``num_tokens`` tokens can make at the most."""
        slot_rows = num_tokens * self.choices
        experts = min(slot_rows, self.experts)
        return max(experts + (slot_rows - experts) // tile, 1)

    def sort_sizes(self, num_tokens: int, *, slots: int) -> SortSizes:
        """The sizes of the sort of ``num_tokens`` tokens."""
        return SortSizes(slot_rows=num_tokens * self.choices, experts=self.experts, keys=self.keys(slots=slots))

    def sorts_narrow(self, num_tokens: int, *, slots: int) -> bool:
        """Whether ``narrow_sort`` sorts ``num_tokens`` tokens: few, each block all of them in few trips to memory."""
        sizes = self.sort_sizes(num_tokens, slots=slots)
        few = num_tokens <= WIDE_ABOVE and sizes.slot_rows <= NARROW_ROWS
        return few and sizes.narrow_bytes <= MOST_SHARED_BYTES

    def sorts_wide(self, num_tokens: int, *, slots: int) -> bool:
        """Whether ``wide_sort`` sorts ``num_tokens`` tokens: many, unless there are too many keys."""
        return num_tokens > WIDE_ABOVE and self.sort_sizes(num_tokens, slots=slots).wide_bytes <= MOST_SHARED_BYTES

    def sorts(self, num_tokens: int) -> bool:
        """Whether a block's shared memory holds the sort of ``num_tokens`` tokens, with adapters and without."""
        return all(
            self.sorts_wide(num_tokens, slots=slots)
            or self.sort_sizes(num_tokens, slots=slots).any_bytes <= MOST_SHARED_BYTES
            for slots in {0, self.max_loras}
        )

    @property
    def direct_plan_bytes(self) -> int:
        """Shared memory that a block sorts few tokens in: a tile, three numbers, eight tokens a slot row; counters."""
        return DIRECT_ROWS * (8 + 2 + 2 + 2 + ROW_ALIGN) + 4 * (32 + 2 * self.experts)

    def direct(self, num_tokens: int, *, lora: bool) -> bool:
        """Whether the first GEMM of ``num_tokens`` tokens, their top-k as sent, needs no sorted copy of them."""
        if num_tokens > FEW_TILE or num_tokens * self.choices > DIRECT_ROWS:
            return False
        config = self.mlp_config(num_tokens, lora=lora, direct=True)
        needed = config.shared_bytes(staging=True, lora_projections=2 * lora, direct_for=self)
        return needed + (SHRINK_BYTES if lora else 0) <= MOST_SHARED_BYTES

    def mlp(self, num_tokens: int, *, lora: bool, direct: bool) -> bool:
        """Whether one kernel has both products. Two, but not the four of ``lora``, take less time where one of the
        products of few tokens has one tile for most multiprocessors and none for the others."""
        items = self._gate_up_items(num_tokens)
        lone = items > HALVED_ITEMS and min(items, self._down_items(num_tokens)) <= LONE_ITEMS
        tile = token_tile(self, num_tokens, lora=lora)
        two = tile == FEW_TILE and lone and direct and not lora
        largest = LORA_TILE if lora else MLP_TILES[-1]
        return tile <= largest and self.mlp_takes(num_tokens, lora=lora) and not two

    def mlp_takes(self, num_tokens: int, *, lora: bool) -> bool:
        """Whether ``num_tokens`` tokens are few enough for an expert MLP, of each expert and together, and sorted by a
        kernel that serves one."""
        most = MLP_LOAD[lora][self.experts >= MANY_EXPERTS]
        few = num_tokens <= MLP_TILES[-1] or self.mean_load(num_tokens) <= most
        few = few and num_tokens <= MLP_TOKENS and num_tokens * self.choices <= MLP_ROWS
        return few and (num_tokens <= WIDE_ABOVE or self.sorts_wide(num_tokens, slots=self.slots(lora=lora)))

    def mlp_config(self, num_tokens: int, *, lora: bool, direct: bool) -> GemmConfig:
        """How that kernel is compiled. Row tiles are halved where whole ones would be few."""
        tile = token_tile(self, num_tokens, lora=lora)
        if direct and tile == FEW_TILE and self._gate_up_items(num_tokens) <= HALVED_ITEMS:
            return few_config()
        deep = deep_config()
        if direct and not lora and deep.shared_bytes(staging=True, direct_for=self) <= MOST_SHARED_BYTES:
            return deep
        if num_tokens > HALVES_ABOVE and tile == MLP_TILES[-1] and not lora:
            return halved_config()
        return gemm_config(tile, lora=lora, direct=direct)

    def _gate_up_items(self, num_tokens: int) -> float:
        """Whole row tiles of gate_up that few tokens ask for, if each hits other experts than the next."""
        return self.hits(num_tokens) * self.intermediate_blocks

    def hits(self, num_tokens: int) -> float:
        """Experts that few tokens hit, if each hits other experts than the next."""
        return num_tokens * (self.top_k * self.num_local_experts / self.num_experts + self.num_shared)

    def _down_items(self, num_tokens: int) -> float:
        """The same of down, as far as there are other experts."""
        hits = min(num_tokens * self.top_k, self.num_experts) * self.num_local_experts / self.num_experts
        return (hits + self.num_shared) * self.output_stride / ROW_TILE

    def slots(self, *, lora: bool) -> int:
        """Adapter slots that rows are sorted by: none without ``lora``."""
        return self.max_loras if lora else 0

    def keys(self, *, slots: int) -> int:
        """What slot rows are sorted by: experts, each without an adapter and with that of each slot."""
        return self.experts * (slots + 1)

    def mean_load(self, num_tokens: int) -> float:
        """Tokens of ``num_tokens`` that an expert has on average."""
        return num_tokens * self.top_k / self.num_experts

    def wide_tile(self, num_tokens: int, *, lora: bool) -> int | None:
        """Tokens a tile of the wide GEMMs of ``num_tokens`` tokens: enough for most experts, so that their weights are
        read once; None where those are not used, or their sort would not fit into shared memory."""
        mean_load = self.mean_load(num_tokens)
        few = mean_load < WIDE_LOAD[lora][self.experts >= MANY_EXPERTS]
        if few or self.mlp_takes(num_tokens, lora=lora) or not self.sorts_wide(num_tokens, slots=self.slots(lora=lora)):
            return None
        return next((tile for tile in WIDE_TILES if tile >= mean_load + WIDE_MARGIN * mean_load**0.5), WIDE_TILES[-1])

    def lora_groups(self, num_tokens: int) -> int:
        """Adapter groups that ``num_tokens`` tokens can make at the most."""
        pairs = min(num_tokens * self.choices, self.experts * self.max_loras)
        return max(pairs + (num_tokens * self.choices - pairs) // self.group_rows(num_tokens), 1)

    def rank_chunks(self, rank_blocks: int) -> int:
        """Chunks of ``rank_blocks`` blocks of ranks that an adapter slot has."""
        return -(-self.max_lora_rank // (RANK_BLOCK * rank_blocks))

    def group_rows(self, num_tokens: int) -> int:
        """Rows of one of those at the most."""
        if not self.mlp(num_tokens, lora=True, direct=False):
            return GROUP_ROWS
        return CROWD_GROUP_ROWS if token_tile(self, num_tokens, lora=True) == LORA_TILE else MLP_GROUP_ROWS


def token_tile(geometry: Geometry, num_tokens: int, *, lora: bool) -> int:
    """Tokens that are multiplied together, a tile or half of one: enough for all tokens of one expert where that is
    possible at all, so that its weights are read once; else as many as an expert MLP may take, or the mean load calls
    for. Results do not depend on it."""
    wanted = min(num_tokens, max(64, round(2 * geometry.mean_load(num_tokens))))
    if geometry.mlp_takes(num_tokens, lora=lora):
        if lora and num_tokens > MLP_TILES[-1] and geometry.mean_load(num_tokens) > LORA_TILE_ABOVE:
            return LORA_TILE
        wanted = min(wanted, MLP_TILES[-1])
    return tile_of(wanted)
