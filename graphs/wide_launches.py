"""The typed launches of kernels that only many tokens need: their gather, and what is around wide GEMMs."""

from . import kernels
from .arguments import Argument, int32
from .kernel import PreparedLaunch
from .lora_launches import LoraLaunches
from .streams import Stream

WIDE_PARTS = {128: 2, 160: 3, 256: 4}
"""Parts of a token tile, by the tile, each a block's of ``wide_gather_shrink`` or ``wide_shrink``."""
WIDE_SHRINK_THREADS = 128
"""Threads of such a block."""
WIDE_GATHER_BYTES, WIDE_SHRINK_BYTES = 3 * (64 + 16 * 8) * 128, 4 * (64 + 8 * 8) * 128
"""Its shared memory: stages of a K-block of 64 rows and of A, 16 columns of it for the first kernel or eight."""
WIDE_GATHER_WARPS = 4


class WideLaunches(LoraLaunches):
    """The part of ``Launches`` that only many tokens have: a gather, and the rest where GEMMs are ``wide``."""

    __slots__ = ()

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
            grid=(self._parts, 1, 1),
            block=(WIDE_SHRINK_THREADS, 1, 1),
            dynamic_shared_bytes=WIDE_GATHER_BYTES,
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
            grid=(self._parts, 1, 1),
            block=(WIDE_SHRINK_THREADS, 1, 1),
            dynamic_shared_bytes=WIDE_SHRINK_BYTES,
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

    @property
    def _parts(self) -> int:
        """Parts of token tiles that there can be at the most."""
        return WIDE_PARTS[self.tile] * self.geometry.token_tiles(self.num_tokens, self.tile)

    def _column_sizes(self, k_blocks: int) -> dict[str, Argument]:
        return {
            "num_experts": int32(self.geometry.experts),
            "k_blocks": int32(k_blocks),
            "rows": int32(self.rows),
            "max_rank": int32(self.geometry.max_lora_rank),
        }
