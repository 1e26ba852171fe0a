"""The typed launches of the sorts, of few slot rows and of many."""

from typing import NamedTuple

from . import kernels
from .arguments import Argument, int32, pointer, uint32
from .compiler import Specialisation
from .gemm_config import RANK_BLOCK
from .kernel import PreparedLaunch
from .site import Site
from .sort_sizes import NARROW_SHARE, SORT_WARPS, WIDE_SORT_BLOCKS, WIDE_SORT_CLUSTERS
from .streams import Stream


def inverse_of(divisor: int) -> int:
    """The 32 bits by which the faster sorts multiply, and keep the high half, to divide by ``divisor``: exact for
    numbers whose product with it is less than 2^32. Of 1, which they do not multiply by, 0."""
    return ((1 << 32) - 1) // divisor + 1 & (1 << 32) - 1


class Sorter(NamedTuple):
    """Which kernel sorts a shape by blocks of ``SORT_WARPS``, and the arguments that it has more than ``sort``."""

    kernel: Specialisation
    blocks: int
    shared_bytes: int
    arguments: dict[str, Argument]


class SortLaunches(Site):
    """The part of ``Launches`` that sorts."""

    __slots__ = ()

    def sort(self, stream: Stream, *, fused: bool) -> PreparedLaunch:
        """Places of all slot rows, token tiles and adapter groups; also resets the GEMMs' tickets and counts. Of few
        tokens by ``narrow_sort``, of many by ``wide_sort``. Unless ``fused`` it tells the slot of each row too."""
        geometry = self.geometry
        tells_slots = self.lora and not fused
        lora_writes = ({"groups", "num_groups"} if self.lora else set()) | ({"row_slots"} if tells_slots else set())
        counts = self.mlp and self.token_config is None  # an expert MLP follows, if the plan is fused
        sorter = self._sorter()
        return self.kernels.get(sorter.kernel, dynamic=True).prepare(
            grid=(sorter.blocks, 1, 1),
            block=(SORT_WARPS * 32, 1, 1),
            dynamic_shared_bytes=sorter.shared_bytes,
            stream=stream,
            arguments={
                **self.sort_input,
                "places": self.buffer("places"),
                "place_tokens": self.buffer("place_tokens"),
                "row_slots": self.buffer("row_slots") if tells_slots else pointer(0),
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "groups": self.lora_buffer("groups"),
                "num_groups": self.lora_buffer("num_groups"),
                "tickets": self.buffer("tickets"),
                "pending": self.buffer("pending") if counts else pointer(0),
                **self.routing_sizes,
                "tile_rows": int32(self.tile_rows),
                "group_rows": int32(self.group_rows),
                "max_tokens": int32(self.num_tokens),
                "tile_parts": int32(2 * geometry.intermediate_stride // self.mlp_config.block_m),
                "group_parts": int32(0 if self.direct else self.shrink_parts),
                "row_parts": int32(self.shrink_parts if self.direct else 0),
                **sorter.arguments,
            },
            waits=True,
            holds=True,
            reads=self.routing_reads,
            writes=frozenset({"places", "place_tokens", "tiles", "num_tiles", "tickets"} | lora_writes)
            | frozenset({"pending"} if counts else ()),
            label="sort",
        )

    def _sorter(self) -> Sorter:
        geometry = self.geometry
        sizes = geometry.sort_sizes(self.num_tokens, slots=self.slots)
        divisors = {"choices": geometry.choices, "tile_rows": self.tile_rows, "buckets": self.slots + 1}
        inverses = {f"{name}_inverse": uint32(inverse_of(divisor)) for name, divisor in divisors.items()}
        more: dict[str, Argument] = {"balanced": int32(self.wide), **inverses}
        if geometry.sorts_narrow(self.num_tokens, slots=self.slots):
            return Sorter(kernels.narrow_sort(), -(-self.slot_rows // NARROW_SHARE), sizes.narrow_bytes, more)
        if geometry.sorts_wide(self.num_tokens, slots=self.slots):
            more |= {"num_tables": int32(sizes.wide_tables), "key_bits": int32(sizes.key_bits)}
            return Sorter(kernels.wide_sort(), WIDE_SORT_CLUSTERS * WIDE_SORT_BLOCKS, sizes.wide_bytes, more)
        blocks = min(max(-(-self.slot_rows // SORT_WARPS), 1 + self.lora), self.sm_count)
        return Sorter(kernels.sort(), blocks, sizes.any_bytes, {})

    def few_sort(self, stream: Stream) -> PreparedLaunch:
        """Places of the slot rows of a token MLP, and what it awaits, missing. It waits at its end alone, beside the
        shared experts' gate where there is one."""
        geometry, awaited = self.geometry, self.awaited
        writes = awaited | {"places"}
        return self.kernels.get(kernels.few_sort()).prepare(
            grid=(-(-self.slot_rows // SORT_WARPS), 1, 1),
            block=(SORT_WARPS * 32, 1, 1),
            stream=stream,
            arguments={
                **self.sort_input,
                "places": self.buffer("places"),
                **self.direct_sizes,
                "act": self.buffer("act"),
                "gate_up_h": self.lora_buffer("gate_up_h"),
                "down_h": self.lora_buffer("down_h"),
                "act_blocks": int32(geometry.intermediate_blocks),
                "act_rows": int32(self.rows),
                "rank_blocks": int32(geometry.max_lora_rank // RANK_BLOCK if self.lora else 0),
            },
            waits=True,
            programmatic=geometry.shared_gated,
            early=self.routing_reads | writes,
            reads=self.routing_reads,
            writes=writes,
            label="sort",
        )
