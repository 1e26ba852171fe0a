"""Where launches find their buffers: one captured shape over one arena."""

from dataclasses import dataclass

from .arena import Arena
from .arguments import Argument, int32, pointer
from .buffers import InputLayout, RoutingInput
from .gemm_config import GemmConfig
from .geometry import SHRINK_PARTS, Geometry, token_tile
from .kernels import KernelSource
from .token_mlp import TokenMlp


@dataclass(frozen=True, slots=True)
class Site:
    """The sizes, buffers and loaded kernels of a shape; ``lora`` says whether any token may have an adapter.

    ``apart``: the products are kernels of their own whatever the shape, for tests and measurements. ``wide``: the GEMMs
    are the wide ones, which ``Geometry.wide_tile`` must have tiles for.
    """

    geometry: Geometry
    num_tokens: int
    routing: RoutingInput
    lora: bool
    arena: Arena
    kernels: KernelSource
    sm_count: int
    apart: bool = False
    wide: bool = False

    @property
    def rows(self) -> int:
        """Permuted rows of the arena's buffers."""
        return self.geometry.rows(self.num_tokens)

    @property
    def slot_rows(self) -> int:
        """Slot rows of the shape: tokens times choices."""
        return self.num_tokens * self.geometry.choices

    @property
    def tile(self) -> int:
        """Tokens that are multiplied together: a token tile, or half of one."""
        wide = self.geometry.wide_tile(self.num_tokens, lora=self.lora) if self.wide else None
        return wide or token_tile(self.geometry, self.num_tokens, lora=self.lora)

    @property
    def tile_rows(self) -> int:
        """Tokens of a tile as the sort makes it: an expert MLP may multiply it by halves."""
        return self.mlp_config.tile_rows if self.mlp else self.tile

    @property
    def group_rows(self) -> int:
        """Rows of an adapter group at the most; for ``wide`` GEMMs groups are whole."""
        return self.slot_rows if self.wide else self.geometry.group_rows(self.num_tokens)

    @property
    def mlp(self) -> bool:
        """Whether a fused forward has both products in one kernel."""
        return not self.apart and self.geometry.mlp(self.num_tokens, lora=self.lora, direct=self.direct)

    @property
    def direct(self) -> bool:
        """Whether the first GEMM of a fused forward makes its tiles from the input, and so needs no gathered tokens."""
        if self.apart or self.routing is not RoutingInput.TOPK:
            return False
        return self.token_config is not None or self.geometry.direct(self.num_tokens, lora=self.lora)

    @property
    def token_config(self) -> TokenMlp | None:
        """How one kernel has all of a fused forward from routing to output, None where it does not."""
        if self.apart or self.routing is not RoutingInput.TOPK:
            return None
        return TokenMlp.of(self.geometry, self.num_tokens, lora=self.lora, sm_count=self.sm_count)

    @property
    def awaited(self) -> frozenset[str]:
        """The buffers that a token MLP awaits without a count, and its sort marks as missing."""
        return frozenset({"act", "gate_up_h", "down_h"} if self.lora else {"act"})

    @property
    def direct_input(self) -> dict[str, Argument]:
        """What a direct kernel reads of the input block."""
        return {name: self.input(name) for name in ("hidden_states", "topk_ids", "token_slots")}

    @property
    def sort_input(self) -> dict[str, Argument]:
        """What a sort reads, but its sizes."""
        return {"layer": self.layer, "topk_ids": self.topk_ids, "token_slots": self.input("token_slots")}

    @property
    def routing_sizes(self) -> dict[str, Argument]:
        """The sizes by which a slot row finds its key."""
        geometry = self.geometry
        return {
            "top_k": int32(geometry.top_k),
            "num_shared": int32(geometry.num_shared),
            "local_offset": int32(geometry.local_expert_offset),
            "num_local": int32(geometry.num_local_experts),
            "num_slots": int32(self.slots),
        }

    @property
    def direct_sizes(self) -> dict[str, Argument]:
        """The sizes by which a kernel sorts, or counts, for itself."""
        return {**self.routing_sizes, "max_tokens": int32(self.num_tokens)}

    @property
    def slots(self) -> int:
        """Adapter slots that rows are sorted by: none without LoRA."""
        return self.geometry.slots(lora=self.lora)

    @property
    def mlp_config(self) -> GemmConfig:
        """How that kernel is compiled."""
        return self.geometry.mlp_config(self.num_tokens, lora=self.lora, direct=self.direct)

    @property
    def shrink_parts(self) -> int:
        """Parts that a group's blocks of ranks are dealt to in that kernel: as many as it takes two at once; of few
        tokens, where rows are no groups, a few, and more while blocks are idle."""
        chunks = max(self.geometry.rank_chunks(self.mlp_config.rank_blocks), 1)
        return min(max(self.sm_count // (2 * self.slot_rows), SHRINK_PARTS), chunks) if self.direct else chunks

    @property
    def layer(self) -> Argument:
        """The layer's head, first in the input block."""
        return self.buffer("input")

    @property
    def routing_reads(self) -> frozenset[str]:
        """The buffers that hold top-k ids and weights."""
        sent = self.routing is RoutingInput.TOPK
        return frozenset({"input"} if sent else {"input", "routed_ids", "routed_weights"})

    @property
    def topk_ids(self) -> Argument:
        """Top-k experts, as sent or as routed."""
        return self.input("topk_ids") if self.routing is RoutingInput.TOPK else self.buffer("routed_ids")

    @property
    def shared_weights(self) -> Argument:
        """The shared experts' weights where a gate of their own makes them, else null."""
        return self.buffer("shared_weights") if self.geometry.shared_gated else pointer(0)

    @property
    def gathering(self) -> dict[str, Argument]:
        """What a gather reads and writes, and the sizes that it goes by."""
        return {
            "hidden": self.input("hidden_states"),
            "places": self.buffer("places"),
            "tokens": self.buffer("tokens"),
            "choices": int32(self.geometry.choices),
            "k_blocks": int32(self.geometry.hidden_blocks),
            "padded_rows": int32(self.rows),
        }

    @property
    def topk_weights(self) -> Argument:
        """Top-k weights, as sent or as routed."""
        return self.input("topk_weights") if self.routing is RoutingInput.TOPK else self.buffer("routed_weights")

    def buffer(self, name: str) -> Argument:
        """The address of a buffer of the arena."""
        return pointer(self.arena.pointer(name))

    def lora_buffer(self, name: str) -> Argument:
        """The address of a buffer that only LoRA shapes have, else null."""
        return self.buffer(name) if self.lora else pointer(0)

    def input(self, name: str) -> Argument:
        """The address of a tensor within the input block."""
        layout = InputLayout(self.geometry, self.num_tokens, self.routing)
        return pointer(self.arena.pointer("input") + layout.fields[name].offset)
