"""A forward's way onto the GPU and back: one pinned block in, one copy, one pinned block out."""

import ctypes

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

NUM_TOKENS_OFFSET = LAYER_ARGS.fields["num_tokens"][1]  # type: ignore[index]
"""Where the head of an input block says how many tokens it has, in bytes."""


def routing_input(batch: LayerBatch) -> RoutingInput:
    """What ``batch`` is routed by."""
    if batch.topk_ids is not None:
        return RoutingInput.TOPK
    return RoutingInput.GATE if batch.router_logits is None else RoutingInput.LOGITS


class Staging:
    """Pinned memory for the inputs and the output of the largest shape of one geometry.

    Tensors go in and out as runs of bytes: nothing here costs time per token but the copies.
    """

    def __init__(self, geometry: Geometry, max_tokens: int) -> None:
        self.geometry = geometry
        in_bytes = max(InputLayout(geometry, max_tokens, routing).total_bytes for routing in RoutingInput)
        self._input = PinnedBuffer(in_bytes)
        self._output = PinnedBuffer(max(max_tokens * geometry.output_stride * 2, 2))
        self._hidden = torch.zeros(max_tokens, geometry.hidden_stride, dtype=torch.bfloat16)
        self._no_slots = torch.full((max_tokens,), -1, dtype=torch.int32)
        self._layouts: dict[tuple[int, RoutingInput], InputLayout] = {}

    def send(
        self,
        batch: LayerBatch,
        head: "np.ndarray[tuple[()], np.dtype[np.void]]",
        variant: Variant,
        arena: Arena,
        stream: Stream,
    ) -> None:
        """Write ``batch`` behind the layer's ``head`` and start the one copy to the GPU."""
        layout = self._layout(variant)
        tokens = batch.num_tokens
        ctypes.memmove(self._input.pointer, head.ctypes.data, LAYER_ARGS.itemsize)
        ctypes.c_int32.from_address(self._input.pointer + NUM_TOKENS_OFFSET).value = tokens
        slots = self._no_slots[:tokens] if batch.token_slots is None else batch.token_slots
        self._write(layout, "token_slots", slots)
        if variant.routing is RoutingInput.TOPK:
            assert batch.topk_ids is not None
            assert batch.topk_weights is not None
            self._write(layout, "topk_ids", batch.topk_ids)
            self._write(layout, "topk_weights", batch.topk_weights)
        elif batch.router_logits is not None:
            self._write(layout, "router_logits", batch.router_logits)
        self._write(layout, "hidden_states", self._padded(batch.hidden_states))
        copy_to_device(arena.pointer("input"), self._input.pointer, layout.used_bytes(tokens), stream)

    def receive(self, num_tokens: int, arena: Arena, stream: Stream) -> Tensor:
        """Start the copy back, wait for it, and return the output, bf16 ``[num_tokens, H]``, in memory of its own."""
        stride, hidden = self.geometry.output_stride, self.geometry.hidden_size
        num_bytes = num_tokens * stride * 2
        copy_to_host(self._output.pointer, arena.pointer("output"), num_bytes, stream)
        output = torch.empty(num_tokens, stride, dtype=torch.bfloat16)
        stream.synchronize()
        ctypes.memmove(output.data_ptr(), self._output.pointer, num_bytes)
        return output if stride == hidden else output[:, :hidden].clone()

    def _layout(self, variant: Variant) -> InputLayout:
        key = (variant.num_tokens, variant.routing)
        if key not in self._layouts:
            self._layouts[key] = InputLayout(self.geometry, *key)
        return self._layouts[key]

    def _padded(self, hidden: Tensor) -> Tensor:
        """Hidden states at the kernels' stride; what lies beyond H stays zero."""
        tokens, width = hidden.shape
        if width == self.geometry.hidden_stride:
            return hidden
        self._hidden[:tokens, :width] = hidden
        return self._hidden[:tokens]

    def _write(self, layout: InputLayout, name: str, tensor: Tensor) -> None:
        source = tensor.contiguous()
        ctypes.memmove(self._input.pointer + layout.fields[name].offset, source.data_ptr(), source.nbytes)

    def close(self) -> None:
        """Free the memory."""
        self._input.close()
        self._output.close()
