"""The typed launches of the LoRA kernels, and of the activation that adds a delta which is kept apart."""

from . import kernels
from .arguments import Argument, int32
from .compiler import Specialisation
from .gemm_config import RANK_BLOCKS
from .kernel import PreparedLaunch
from .site import Site
from .streams import Stream

GATE_UP, DOWN = 2, 1
"""Projections of the two halves of the layer's LoRA."""


class LoraLaunches(Site):
    """The part of ``Launches`` that only LoRA shapes have."""

    __slots__ = ()

    def lora_shrink(self, stream: Stream, projections: int, *, programmatic: bool = False) -> PreparedLaunch:
        """h = scaling * A x of gate and up (``GATE_UP``) or of down (``DOWN``)."""
        geometry = self.geometry
        source, target = ("tokens", "gate_up_h") if projections == GATE_UP else ("act", "down_h")
        blocks = geometry.hidden_blocks if projections == GATE_UP else geometry.intermediate_blocks
        chunks = geometry.rank_chunks(RANK_BLOCKS) * projections
        return self._lora(
            stream,
            kernels.lora_shrink(projections),
            chunks,
            {"tokens": self.buffer(source), "h": self.buffer(target)},
            {"k_steps": int32(2 * blocks)},
            reads=source,
            writes=target,
            programmatic=programmatic,
        )

    def lora_expand(self, stream: Stream, projections: int) -> PreparedLaunch:
        """delta = B h of gate and up (``GATE_UP``) or of down (``DOWN``)."""
        geometry = self.geometry
        source, target = ("gate_up_h", "gate_up_delta") if projections == GATE_UP else ("down_h", "down_delta")
        features = geometry.intermediate_stride * 2 if projections == GATE_UP else geometry.output_stride
        row_blocks = features // 16
        return self._lora(
            stream,
            kernels.lora_expand(projections),
            -(-row_blocks // 16),
            {"h": self.buffer(source), "delta": self.buffer(target)},
            {"row_blocks": int32(row_blocks)},
            reads=source,
            writes=target,
        )

    def activation(self, stream: Stream) -> PreparedLaunch:
        """The activation over raw pairs and the LoRA delta."""
        geometry = self.geometry
        items = geometry.token_tiles(self.num_tokens, self.tile) * geometry.intermediate_blocks
        return self.kernels.get(kernels.activation()).prepare(
            grid=(min(items, 8 * self.sm_count), 1, 1),
            block=(256, 1, 1),
            stream=stream,
            arguments={
                "tiles": self.buffer("tiles"),
                "num_tiles": self.buffer("num_tiles"),
                "row_slots": self.buffer("row_slots"),
                "gate_up": self.buffer("gate_up"),
                "delta": self.buffer("gate_up_delta"),
                "act": self.buffer("act"),
                "intermediate_blocks": int32(geometry.intermediate_blocks),
                "rows": int32(self.rows),
            },
            waits=True,
            holds=True,
            reads=frozenset({"tiles", "num_tiles", "row_slots", "gate_up", "gate_up_delta"}),
            writes=frozenset({"act"}),
        )

    def _lora(
        self,
        stream: Stream,
        specialisation: Specialisation,
        chunks: int,
        operands: dict[str, Argument],
        sizes: dict[str, Argument],
        *,
        reads: str,
        writes: str,
        programmatic: bool = False,
    ) -> PreparedLaunch:
        """A launch over ``chunks`` parts of every adapter group."""
        geometry = self.geometry
        items = geometry.lora_groups(self.num_tokens) * chunks
        return self.kernels.get(specialisation).prepare(
            grid=(min(items, (1 + programmatic) * self.sm_count), 1, 1),
            block=(256, 1, 1),
            stream=stream,
            arguments={
                "layer": self.layer,
                "groups": self.buffer("groups"),
                "num_groups": self.buffer("num_groups"),
                **operands,
                "num_experts": int32(geometry.experts),
                **sizes,
                "rows": int32(self.rows),
                "max_rank": int32(geometry.max_lora_rank),
            },
            waits=True,
            holds=True,
            programmatic=programmatic,
            early=frozenset({"input", "groups", "num_groups"} if programmatic else ()),
            reads=frozenset({"input", "groups", "num_groups", reads}),
            writes=frozenset({writes}),
            label=f"{specialisation.kernel} of {'gate_up' if 'gate_up' in writes else 'down'}",
        )
