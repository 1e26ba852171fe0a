"""The typed launches of kernels that only many tokens need: their sort and gather, and what is around wide GEMMs."""

from . import kernels
from .arguments import Argument, int32
from .geometry import WIDE_SHARES, WIDE_SORT_WARPS
from .kernel import PreparedLaunch
from .lora_launches import LoraLaunches
from .streams import Stream

WIDE_GATHER_PARTS, WIDE_SHRINK_PARTS = {128: 2, 160: 2, 256: 4}, 2
"""Parts of a token tile, each a block's of ``wide_gather_shrink``, by the tile, or of ``wide_shrink``."""
WIDE_WARP_ROWS = 16
"""Rows that a warp of either takes."""
WIDE_GATHER_STAGES = 4
"""Stages of a block of ``wide_gather_shrink``."""
WIDE_SHRINK_STAGES = {128: 6, 160: 6, 256: 4}
"""Those of a block of ``wide_shrink``, by the tile: as many as leave room for two blocks on an SM."""
WIDE_GATHER_WARPS = 4
WIDE_FINALIZE_BLOCKS = 5
"""Blocks of ``wide_finalize`` that an SM holds."""


def wide_parts(tile: int, *, gathers: bool) -> int:
    """Parts of a token tile, each a block's of the kernel that shrinks and ``gathers`` or does not."""
    return WIDE_GATHER_PARTS[tile] if gathers else WIDE_SHRINK_PARTS


def wide_shrink_threads(tile: int, *, gathers: bool) -> int:
    """Threads of such a block: a warp for so many rows, and one that brings them unless all do."""
    return 32 * (tile // wide_parts(tile, gathers=gathers) // WIDE_WARP_ROWS + (not gathers))


def wide_shrink_bytes(tile: int, *, gathers: bool) -> int:
    """Shared memory of such a block: stages of a K-block of its rows and of eight columns of A, or a ring of them."""
    stage_bytes = tile // wide_parts(tile, gathers=gathers) * 128 + 8 * 1024
    return WIDE_GATHER_STAGES * stage_bytes if gathers else WIDE_SHRINK_STAGES[tile] * (stage_bytes + 16)


class WideLaunches(LoraLaunches):
    """The part of ``Launches`` that only many tokens have: sort and gather, and the rest where GEMMs are ``wide``."""

    __slots__ = ()

    def wide_count(self, stream: Stream) -> PreparedLaunch:
        """What each share of the slot rows has of every key."""
        return self.kernels.get(kernels.wide_count(), dynamic=True).prepare(
            grid=(WIDE_SHARES, 1, 1),
            block=(32 * WIDE_SORT_WARPS, 1, 1),
            dynamic_shared_bytes=4 * self.geometry.keys(slots=self.slots),
            stream=stream,
            arguments={
                **self.sort_input,
                "counts": self.buffer("counts"),
                **self.routing_sizes,
                "share": int32(self._share),
            },
            waits=True,
            holds=True,
            reads=self.routing_reads,
            writes=frozenset({"counts"}),
            label="count",
        )

    def wide_sort(self, stream: Stream) -> PreparedLaunch:
        """As ``sort``, from those counts. For ``wide`` GEMMs groups are whole and an expert's tiles are about equal."""
        lora_writes = {"groups", "num_groups"} if self.lora else set()
        return self.kernels.get(kernels.wide_sort(), dynamic=True).prepare(
            grid=(WIDE_SHARES, 1, 1),
            block=(32 * WIDE_SORT_WARPS, 1, 1),
            dynamic_shared_bytes=self.geometry.wide_sort_shared_bytes(slots=self.slots),
            stream=stream,
            arguments={
                **self.sort_input,
                "counts": self.buffer("counts"),
                "places": self.buffer("places"),
                "place_tokens": self.buffer("place_tokens"),
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "groups": self.lora_buffer("groups"),
                "num_groups": self.lora_buffer("num_groups"),
                "tickets": self.buffer("tickets"),
                **self.routing_sizes,
                "tile_rows": int32(self.tile),
                "max_tokens": int32(self.num_tokens),
                "group_rows": int32(self.slot_rows if self.wide else self.geometry.group_rows(self.num_tokens)),
                "balanced": int32(self.wide),
                "share": int32(self._share),
            },
            waits=True,
            holds=True,
            programmatic=True,
            reads=self.routing_reads | {"counts"},
            writes=frozenset({"places", "place_tokens", "tiles", "num_tiles", "tickets"} | lora_writes),
            label="sort",
        )

    def wide_gather(self, stream: Stream) -> PreparedLaunch:
        """Hidden states at their places, in BlockMajorK."""
        return self.kernels.get(kernels.wide_gather()).prepare(
            grid=(-(-self.num_tokens // WIDE_GATHER_WARPS), 1, 1),
            block=(WIDE_GATHER_WARPS * 32, 1, 1),
            stream=stream,
            arguments={**self.gathering, "num_tokens": int32(self.num_tokens)},
            waits=True,
            holds=True,
            programmatic=True,
            reads=frozenset({"input", "places"}),
            writes=frozenset({"tokens"}),
            label="gather",
        )

    def wide_gather_shrink(self, stream: Stream) -> PreparedLaunch:
        """The gather, and on its way h of gate and up."""
        return self.kernels.get(kernels.wide_gather_shrink(self.tile), dynamic=True).prepare(
            grid=(wide_parts(self.tile, gathers=True) * self.geometry.token_tiles(self.num_tokens, self.tile), 1, 1),
            block=(wide_shrink_threads(self.tile, gathers=True), 1, 1),
            dynamic_shared_bytes=wide_shrink_bytes(self.tile, gathers=True),
            stream=stream,
            arguments={
                "layer": self.layer,
                "hidden": self.input("hidden_states"),
                "place_tokens": self.buffer("place_tokens"),
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "groups": self.buffer("groups"),
                "tokens": self.buffer("tokens"),
                "h": self.buffer("gate_up_h"),
                **self._column_sizes(self.geometry.hidden_blocks),
            },
            waits=True,
            holds=True,
            programmatic=True,
            reads=frozenset({"input", "place_tokens", "tiles", "num_tiles", "groups"}),
            writes=frozenset({"tokens", "gate_up_h"}),
            label="gather and lora_shrink of gate_up",
        )

    def wide_shrink(self, stream: Stream) -> PreparedLaunch:
        """h of down."""
        return self.kernels.get(kernels.wide_shrink(self.tile), dynamic=True).prepare(
            grid=(2 * self.sm_count, 1, 1),
            block=(wide_shrink_threads(self.tile, gathers=False), 1, 1),
            dynamic_shared_bytes=wide_shrink_bytes(self.tile, gathers=False),
            stream=stream,
            arguments={
                "layer": self.layer,
                "act": self.buffer("act"),
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "groups": self.buffer("groups"),
                "h": self.buffer("down_h"),
                **self._column_sizes(self.geometry.intermediate_blocks),
            },
            waits=True,
            holds=True,
            programmatic=True,
            early=frozenset({"input", "tiles", "num_tiles", "groups"}),
            reads=frozenset({"input", "act", "tiles", "num_tiles", "groups"}),
            writes=frozenset({"down_h"}),
            label="lora_shrink of down",
        )

    def wide_finalize(self, stream: Stream) -> PreparedLaunch:
        """The weighted sum over choices."""
        geometry = self.geometry
        return self.kernels.get(kernels.wide_finalize()).prepare(
            grid=(WIDE_FINALIZE_BLOCKS * self.sm_count, 1, 1),
            block=(128, 1, 1),
            stream=stream,
            arguments={
                "layer": self.layer,
                "places": self.buffer("places"),
                "topk_weights": self.topk_weights,
                "shared_weights": self.shared_weights,
                "down": self.buffer("down"),
                "out": self.buffer("output"),
                "top_k": int32(geometry.top_k),
                "num_shared": int32(geometry.num_shared),
                "hidden_stride": int32(geometry.output_stride),
                "rows": int32(self.rows),
            },
            waits=True,
            programmatic=True,
            reads=self.routing_reads | {"places", "shared_weights", "down"},
            writes=frozenset({"output"}),
            label="finalize",
        )

    @property
    def _share(self) -> int:
        return -(-self.slot_rows // WIDE_SHARES)

    def _column_sizes(self, k_blocks: int) -> dict[str, Argument]:
        return {
            "num_experts": int32(self.geometry.experts),
            "k_blocks": int32(k_blocks),
            "rows": int32(self.rows),
            "max_rank": int32(self.geometry.max_lora_rank),
        }
