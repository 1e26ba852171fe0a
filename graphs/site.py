"""Where launches find their buffers: one captured shape over one arena."""

from dataclasses import dataclass

from .arena import Arena
from .arguments import Argument, pointer
from .buffers import InputLayout, RoutingInput
from .geometry import Geometry, token_tile
from .kernels import Kernels


@dataclass(frozen=True, slots=True)
class Site:
    """The sizes, buffers and loaded kernels of a shape; ``lora`` says whether any token may have an adapter."""

    geometry: Geometry
    num_tokens: int
    routing: RoutingInput
    lora: bool
    arena: Arena
    kernels: Kernels
    sm_count: int

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
        """Tokens of a token tile."""
        return token_tile(self.geometry, self.num_tokens)

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
