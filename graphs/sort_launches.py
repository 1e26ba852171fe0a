"""The typed launches of the sorts of one kernel, of few slot rows and of many."""

from . import kernels
from .arguments import Argument, int32, pointer, uint32
from .gemm_config import RANK_BLOCK
from .geometry import NARROW_SHARE
from .kernel import PreparedLaunch
from .site import Site
from .streams import Stream

SORT_WARPS = 16


def inverse_of(divisor: int) -> int:
    """The 32 bits by which ``narrow_sort`` multiplies, and keeps the high half, to divide by ``divisor``: exact for
    numbers whose product with it is less than 2^32. Of 1, which it does not multiply by, 0."""
    return ((1 << 32) - 1) // divisor + 1 & (1 << 32) - 1


class SortLaunches(Site):
    """The part of ``Launches`` that sorts in one kernel."""

    __slots__ = ()

    def sort(self, stream: Stream) -> PreparedLaunch:
        """Places of all slot rows, token tiles and adapter groups; also resets the GEMMs' tickets and counts. Of few
        tokens by ``narrow_sort``."""
        geometry = self.geometry
        lora_writes = {"row_slots", "groups", "num_groups"} if self.lora else set()
        counts = self.mlp and self.token_config is None  # an expert MLP follows, if the plan is fused
        narrow: dict[str, Argument] = {}
        if self.sorts_narrow:
            kernel = kernels.narrow_sort()
            divisors = {"choices": geometry.choices, "tile_rows": self.tile_rows, "buckets": self.slots + 1}
            inverses = {f"{name}_inverse": uint32(inverse_of(divisor)) for name, divisor in divisors.items()}
            narrow = {"balanced": int32(self.wide)} | inverses
            blocks = -(-self.slot_rows // NARROW_SHARE)
            shared_bytes = geometry.narrow_sort_shared_bytes(slots=self.slots)
        else:
            kernel = kernels.sort()
            blocks = min(max(-(-self.slot_rows // SORT_WARPS), 1 + self.lora), self.sm_count)
            shared_bytes = geometry.sort_shared_bytes(self.num_tokens, slots=self.slots)
        return self.kernels.get(kernel, dynamic=True).prepare(
            grid=(blocks, 1, 1),
            block=(SORT_WARPS * 32, 1, 1),
            dynamic_shared_bytes=shared_bytes,
            stream=stream,
            arguments={
                **self.sort_input,
                "places": self.buffer("places"),
                "place_tokens": self.buffer("place_tokens"),
                "row_slots": self.lora_buffer("row_slots"),
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
                **narrow,
            },
            waits=True,
            holds=True,
            reads=self.routing_reads,
            writes=frozenset({"places", "place_tokens", "tiles", "num_tiles", "tickets"} | lora_writes)
            | frozenset({"pending"} if counts else ()),
            label="sort",
        )

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
