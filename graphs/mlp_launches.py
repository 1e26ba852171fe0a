"""The typed launches of the kernels that have both products of the experts."""

from ..layer.errors import EngineError
from . import kernels
from .arguments import Argument, int32, pointer
from .gemm_config import SHRINK_THREADS
from .kernel import PreparedLaunch
from .lora_launches import GATE_UP, LoraLaunches
from .streams import Stream
from .token_mlp import WARPS

PAIR_ROUNDS = 3
"""Items a multiprocessor from which on two row tiles of gate_up are one item, whose tokens are brought once: enough
that the coarser items leave none idle."""


class MlpLaunches(LoraLaunches):
    """The part of ``Launches`` that takes the two GEMMs, and what LoRA has between them, in one."""

    __slots__ = ()

    def expert_mlp(self, stream: Stream) -> PreparedLaunch:
        """Both products of the experts, and the shrinks between; few tokens it takes as they came."""
        geometry, config = self.geometry, self.mlp_config
        row_tiles = (2 * geometry.intermediate_stride + geometry.output_stride) // config.block_m
        items = geometry.token_tiles(self.num_tokens, self.tile_rows) * row_tiles
        sorted_reads = set() if self.direct else {"tiles", "place_tokens"}
        lora_reads = {"tiles", "groups"} | ({"num_groups"} if sorted_reads else set()) if self.lora else set()
        lora_writes = {"gate_up_h", "down_h"} if self.lora else set()
        shrunk_early = {"gate_up_h"} if self.direct and self.lora else set()
        routing = self.routing_reads - {"routed_weights"}
        return self.kernels.get(kernels.expert_mlp(config, lora=self.lora), dynamic=True).prepare(
            grid=(min(items, self.sm_count), 1, 1),
            block=(config.threads(lora=self.lora, mlp=True), 1, 1),
            dynamic_shared_bytes=config.shared_bytes(
                staging=True,
                lora_projections=GATE_UP if self.lora else 0,
                direct_for=geometry if self.direct else None,
            ),
            stream=stream,
            arguments=self._mlp_buffers() | self._mlp_sizes(),
            waits=True,
            holds=True,
            programmatic=True,
            early=frozenset(routing | shrunk_early),
            reads=frozenset(routing | sorted_reads | lora_reads),
            writes=frozenset({"act", "down", "tickets", "pending"} | lora_writes),
        )

    def token_mlp(self, stream: Stream) -> PreparedLaunch:
        """All of a few tokens' layer that follows the routing. Raises ``EngineError`` where there is no room for it."""
        config = self.token_config
        if config is None:
            raise EngineError(f"there is no token MLP of {self.num_tokens} tokens of this layer")
        return self.kernels.get(kernels.token_mlp(lora=self.lora), dynamic=True).prepare(
            grid=(self.sm_count, 1, 1),
            block=(32 * (WARPS + 1) + (SHRINK_THREADS if self.lora else 0), 1, 1),
            dynamic_shared_bytes=config.shared_bytes,
            stream=stream,
            arguments={
                "layer": self.layer,
                "hidden_states": self.input("hidden_states"),
                "topk_ids": self.topk_ids,
                "topk_weights": self.topk_weights,
                "token_slots": self.input("token_slots"),
                "shared_weights": self.shared_weights,
                "gate_up_h": self.lora_buffer("gate_up_h"),
                "down_h": self.lora_buffer("down_h"),
                "act": self.buffer("act"),
                "down": self.buffer("down"),
                "out": self.buffer("output"),
                **self.direct_sizes,
                **self._layer_sizes(),
                "shrink_parts": int32(self.shrink_parts),
                "slices": int32(config.slices),
                "parts": int32(config.parts),
                "part_share": int32(config.part_share),
                "item_blocks": int32(config.item_blocks),
                "down_blocks": int32(config.down_blocks),
                "down_parts": int32(config.down_parts),
                "last_blocks": int32(config.last_blocks),
                "num_stages": int32(config.num_stages),
                "stage_bytes": int32(config.stage_bytes),
                "stages_offset": int32(config.stages_offset),
                "hidden_bytes": int32(config.hidden_bytes),
                "act_bytes": int32(config.act_bytes),
            },
            waits=True,
            holds=True,
            programmatic=True,
            early=frozenset({"input"}),
            reads=frozenset({"input", "shared_weights"}),
            writes=self.awaited | {"down", "output"},
        )

    def _mlp_buffers(self) -> dict[str, Argument]:
        """The buffers, null where the kernel as it is compiled touches none."""
        null, direct, lora = pointer(0), self.direct, self.lora
        return {
            "layer": self.layer,
            "hidden_states": self.input("hidden_states"),
            "topk_ids": self.topk_ids,
            "token_slots": self.input("token_slots") if direct else null,
            "place_tokens": null if direct else self.buffer("place_tokens"),
            "tiles": null if direct and not lora else self.buffer("tiles"),
            "groups": self.lora_buffer("groups"),
            "num_groups": null if direct else self.lora_buffer("num_groups"),
            "gate_up_h": self.lora_buffer("gate_up_h"),
            "down_h": self.lora_buffer("down_h"),
            "ticket": self.buffer("tickets"),
            "pending": self.buffer("pending"),
            "act": self.buffer("act"),
            "down": self.buffer("down"),
        }

    def _layer_sizes(self) -> dict[str, Argument]:
        geometry = self.geometry
        return {
            "num_experts": int32(geometry.experts),
            "hidden_blocks": int32(geometry.hidden_blocks),
            "intermediate_blocks": int32(geometry.intermediate_blocks),
            "output_stride": int32(geometry.output_stride),
            "rows": int32(self.rows),
            "max_rank": int32(geometry.max_lora_rank),
        }

    def _mlp_sizes(self) -> dict[str, Argument]:
        return {
            **self.direct_sizes,
            **self._layer_sizes(),
            "shrink_parts": int32(self.shrink_parts),
            "pair_items": int32(PAIR_ROUNDS * self.sm_count),
        }
