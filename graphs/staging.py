"""A forward's way onto the GPU and back: one pinned block in, one copy, one pinned block out."""

import numpy as np
import torch
from torch import Tensor

from ..layer.engine import LayerBatch
from .arena import Arena
from .buffers import LAYER_ARGS, InputLayout, RoutingInput
from .geometry import Geometry
from .memory import PinnedBuffer, copy_to_device, copy_to_host
from .pool import Variant
from .streams import Stream


def routing_input(batch: LayerBatch) -> RoutingInput:
    """What ``batch`` is routed by."""
    if batch.topk_ids is not None:
        return RoutingInput.TOPK
    return RoutingInput.GATE if batch.router_logits is None else RoutingInput.LOGITS


class Staging:
    """Pinned memory for the inputs and the output of the largest shape of one geometry."""

    def __init__(self, geometry: Geometry, max_tokens: int) -> None:
        self.geometry = geometry
        in_bytes = max(InputLayout(geometry, max_tokens, routing).total_bytes for routing in RoutingInput)
        self._input = PinnedBuffer(in_bytes)
        self._output = PinnedBuffer(max(max_tokens * geometry.output_stride * 2, 2))

    def send(
        self,
        batch: LayerBatch,
        head: "np.ndarray[tuple[()], np.dtype[np.void]]",
        variant: Variant,
        arena: Arena,
        stream: Stream,
    ) -> None:
        """Write ``batch`` behind the layer's ``head`` and start the one copy to the GPU."""
        layout = InputLayout(self.geometry, variant.num_tokens, variant.routing)
        tokens = batch.num_tokens
        staged = self._input.array(LAYER_ARGS, (1,))
        staged[0] = head
        staged["num_tokens"] = tokens
        fields: dict[str, Tensor | None] = {
            "token_slots": batch.token_slots,
            "topk_ids": batch.topk_ids,
            "topk_weights": batch.topk_weights,
            "router_logits": batch.router_logits,
        }
        for name, tensor in fields.items():
            if tensor is not None and name in layout.fields:
                self._field(layout, name, tokens).copy_(tensor)
        if batch.token_slots is None:
            self._field(layout, "token_slots", tokens).fill_(-1)
        hidden = self._field(layout, "hidden_states", tokens)
        hidden[:, : self.geometry.hidden_size].copy_(batch.hidden_states)
        hidden[:, self.geometry.hidden_size :].zero_()
        copy_to_device(arena.pointer("input"), self._input.pointer, layout.used_bytes(tokens), stream)

    def receive(self, num_tokens: int, arena: Arena, stream: Stream) -> Tensor:
        """Start the copy back, wait for it, and return the output, bf16 ``[num_tokens, H]``, in memory of its own."""
        stride = self.geometry.output_stride
        copy_to_host(self._output.pointer, arena.pointer("output"), num_tokens * stride * 2, stream)
        stream.synchronize()
        staged = self._output.tensor(torch.bfloat16, (num_tokens, stride))
        return staged[:, : self.geometry.hidden_size].clone()

    def _field(self, layout: InputLayout, name: str, num_tokens: int) -> Tensor:
        field = layout.fields[name]
        return self._input.tensor(field.dtype, (num_tokens, *field.shape[1:]), field.offset)

    def close(self) -> None:
        """Free the memory."""
        self._input.close()
        self._output.close()
