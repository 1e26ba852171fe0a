"""Structs shared with the kernels, the block that carries a forward's inputs, and the buffers of a captured shape."""

import math
from dataclasses import dataclass
from enum import StrEnum
from struct import Struct

import numpy as np
import torch

from ..layer.layout import BLOCK_K, round_up
from .arena import ArenaPlan, BufferSpec
from .gemm_config import RANK_BLOCK
from .geometry import Geometry, token_tile

LAYER_POINTERS = (
    "gate_up",
    "down",
    "router",
    "correction_bias",
    "shared_gate",
    "lora_a_gate_up",
    "lora_b_gate_up",
    "lora_a_down",
    "lora_b_down",
    "lora",
)
LAYER_ARGS = np.dtype(
    [(name, np.uint64) for name in (*LAYER_POINTERS, "output")] + [("num_tokens", np.int32), ("reserved", np.int32)],
    align=True,
)
"""Twin of ``LayerArgs`` in cuda/common/layer_args.cuh: what names the layer, and behind it what names a forward."""
FORWARD_ARGS = Struct("<Qi4x")
"""The part of ``LAYER_ARGS`` behind ``LAYER_POINTERS``."""
INPUT_HEAD = Struct(f"<{LAYER_ARGS.itemsize - FORWARD_ARGS.size}s{FORWARD_ARGS.format[1:]}")
"""All of ``LAYER_ARGS``, from the bytes of its ``LAYER_POINTERS``."""
LORA_ENTRY = np.dtype(
    [("rank", np.int32, 3), ("scaling", np.float32, 3), ("shared_a", np.int32), ("shared_b", np.int32)], align=True
)
"""Twin of ``LoraEntry`` in cuda/common/layer_args.cuh."""
TOKEN_TILE = np.dtype([(name, np.int32) for name in ("expert", "first_row", "num_rows", "groups")], align=True)
"""Twin of ``TokenTile`` in cuda/common/tiles.cuh."""
LORA_GROUP = np.dtype([(name, np.int32) for name in ("expert", "slot", "first_row", "num_rows")], align=True)
"""Twin of ``LoraGroup`` in cuda/common/tiles.cuh."""

INPUT_ALIGNMENT = 256


class RoutingInput(StrEnum):
    """What a forward routes by: top-k as sent, router logits as sent, or the checkpoint's own gate."""

    TOPK = "topk"
    LOGITS = "logits"
    GATE = "gate"


@dataclass(frozen=True, slots=True)
class InputField:
    """One tensor within an input block: byte offset, dtype and shape for all tokens of the captured shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class InputLayout:
    """Where a forward's inputs lie in the one block that is copied to the GPU: the layer's head first, hidden states
    last, so that a batch smaller than its shape copies no padding tokens."""

    def __init__(self, geometry: Geometry, num_tokens: int, routing: RoutingInput) -> None:
        self.fields: dict[str, InputField] = {}
        self._end = round_up(LAYER_ARGS.itemsize, INPUT_ALIGNMENT)
        self._add("token_slots", torch.int32, (num_tokens,))
        if routing is RoutingInput.TOPK:
            self._add("topk_ids", torch.int32, (num_tokens, geometry.top_k))
            self._add("topk_weights", torch.float32, (num_tokens, geometry.top_k))
        elif routing is RoutingInput.LOGITS:
            self._add("router_logits", torch.float32, (num_tokens, geometry.num_experts))
        self._add("hidden_states", torch.bfloat16, (num_tokens, geometry.hidden_stride))
        self.total_bytes = self._end

    def _add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.fields[name] = InputField(self._end, dtype, shape)
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._end = round_up(self._end + num_bytes, INPUT_ALIGNMENT)

    def bytes_of(self, name: str, num_tokens: int) -> int:
        """Bytes that ``num_tokens`` take of field ``name``, from its offset on."""
        field = self.fields[name]
        return num_tokens * math.prod(field.shape[1:]) * field.dtype.itemsize


def plan_buffers(geometry: Geometry, num_tokens: int, *, lora: bool, apart: bool = True) -> ArenaPlan:
    """The buffers of one shape, by name.

    ``input`` is the largest of the input layouts; ``places`` maps slot rows to permuted rows, ``place_tokens`` those to
    tokens. LoRA's buffers exist only where ``lora`` is set, those of the plans that keep the delta apart only where
    ``apart`` is too.
    """
    rows = geometry.rows(num_tokens)
    slot_rows = max(num_tokens * geometry.choices, 1)
    tiles = geometry.token_tiles(num_tokens, token_tile(geometry, num_tokens, lora=lora))
    inputs = max(InputLayout(geometry, num_tokens, kind).total_bytes for kind in RoutingInput)
    half, single, word = torch.bfloat16, torch.float32, torch.int32
    buffers = [
        BufferSpec("input", (inputs,), torch.uint8),
        BufferSpec("output", (num_tokens, geometry.output_stride), half),
        BufferSpec("logits", (num_tokens, geometry.num_experts), single),
        BufferSpec("shared_weights", (num_tokens,), single),
        BufferSpec("routed_ids", (num_tokens, geometry.top_k), word),
        BufferSpec("routed_weights", (num_tokens, geometry.top_k), single),
        BufferSpec("places", (slot_rows,), word),
        BufferSpec("place_tokens", (rows,), word),
        BufferSpec("tiles", (tiles, 4), word),
        BufferSpec("num_tiles", (1,), word),
        BufferSpec("tickets", (2,), word),
        BufferSpec("pending", (3 * geometry.experts + 1,), word),
        BufferSpec("tokens", (geometry.hidden_blocks, rows, BLOCK_K), half, 1024),
        BufferSpec("act", (geometry.intermediate_blocks, rows, BLOCK_K), half, 1024),
        BufferSpec("down", (rows, geometry.output_stride), half),
    ]
    if lora:
        rank = geometry.max_lora_rank
        buffers += [
            BufferSpec("row_slots", (rows,), word),
            BufferSpec("groups", (geometry.lora_groups(num_tokens), 4), word),
            BufferSpec("num_groups", (1,), word),
            BufferSpec("gate_up_h", (rank // RANK_BLOCK, rows, 2, RANK_BLOCK), half),
            BufferSpec("down_h", (rank // RANK_BLOCK, rows, 1, RANK_BLOCK), half),
        ]
    if lora and apart:
        buffers += [
            BufferSpec("gate_up", (rows, geometry.intermediate_stride, 2), single),
            BufferSpec("gate_up_delta", (rows, geometry.intermediate_stride, 2), half),
            BufferSpec("down_sums", (rows, geometry.output_stride), single),
            BufferSpec("down_delta", (rows, geometry.output_stride), half),
        ]
    return ArenaPlan(f"{num_tokens} tokens{', LoRA' if lora else ''}", buffers)
