"""A forward's way onto the GPU and back: one pinned block in, one copy each way, one pinned block out."""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..layer.engine import LayerBatch
from .arena import Arena
from .buffers import LAYER_ARGS, InputLayout, RoutingInput
from .detour import Detour
from .geometry import Geometry
from .memory import PinnedBuffer, copy_to_device, copy_to_host
from .outputs import OutputBlocks
from .pool import Variant
from .streams import Event, Stream, Streams

NUM_TOKENS_OFFSET = LAYER_ARGS.fields["num_tokens"][1]  # type: ignore[index]
"""Where the head of an input block says how many tokens it has, in bytes."""


def routing_input(batch: LayerBatch) -> RoutingInput:
    """What ``batch`` is routed by."""
    if batch.topk_ids is not None:
        return RoutingInput.TOPK
    return RoutingInput.GATE if batch.router_logits is None else RoutingInput.LOGITS


class Arrival:
    """A forward that was put on a stream: ``result`` waits for its output. ``enter`` lets its thread use the device.

    ``finish`` makes the output, of a copy or, where there is a place for those that are ``lost``, of memory kept for
    it. One is lost that was waited for in vain: it may be written at any time, and its memory is not used again.
    ``under_way`` until it is taken, and with it the memory it arrived in is free.
    """

    __slots__ = ("_done", "_enter", "_finish", "_lost", "under_way")

    def __init__(
        self,
        done: Event,
        finish: Callable[[], Tensor],
        enter: Callable[[], None] | None,
        *,
        lost: list[Tensor] | None,
    ) -> None:
        self._done = done
        self._finish = finish
        self._enter = enter
        self._lost = lost
        self.under_way = True

    def result(self) -> Tensor:
        """The output, bf16 ``[num_tokens, H]`` on the host; call once, from any thread."""
        if self._enter is not None:
            self._enter()
        if self._lost is None:
            self._done.synchronize()
            output = self._finish()
        else:
            output = self._finish()  # only the memory is looked at, and the GPU still computes
            try:
                self._done.synchronize()
            except BaseException:
                self._lost.append(output)
                raise
        self.under_way = False
        return output


class Staging:
    """Pinned memory for the inputs and outputs of the largest shape of one geometry, ``depth`` forwards at a time.

    Tensors go in and out as runs of bytes: nothing here costs time per token but the copies. Outputs of up to
    ``kept_tokens`` tokens are not copied out of pinned memory, unless too many are held by who asked for them.
    A forward goes through the memory of the last one if that was waited for, else through the next: however many
    forwards follow each other while one ahead of them is still to be waited for, that one's memory is left alone.
    """

    kept_blocks = 16
    """Outputs that can be held at a time without a copy."""

    def __init__(
        self,
        geometry: Geometry,
        max_tokens: int,
        *,
        kept_tokens: int = 0,
        depth: int = 1,
        enter: Callable[[], None] | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.geometry = geometry
        self._enter = enter
        in_bytes = max(InputLayout(geometry, max_tokens, routing).total_bytes for routing in RoutingInput)
        self._inputs = [PinnedBuffer(in_bytes) for _ in range(depth)]
        self._outputs = [PinnedBuffer(max(max_tokens * geometry.output_stride * 2, 2)) for _ in range(depth)]
        self._done = [Event(f"done {place}") for place in range(depth)]
        row_bytes = geometry.output_stride * 2
        keeps = kept_tokens > 0 and geometry.output_stride == geometry.hidden_size  # rows as they are asked for
        self._kept = OutputBlocks(self.kept_blocks if keeps else 0, max(kept_tokens, 1) * row_bytes)
        self._lost: list[Tensor] = []
        self._detour: Detour | None = None
        if streams is not None:
            crossing = max(InputLayout(geometry, kept_tokens, routing).total_bytes for routing in RoutingInput)
            self._detour = Detour(depth, crossing, kept_tokens * row_bytes, streams)
        self._place = 0
        self._latest: Arrival | None = None
        self._crossing: Detour | None = None  # what the forward that was sent last goes through
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
        *,
        beside: bool = False,
    ) -> None:
        """Write ``batch`` behind the layer's ``head`` and start the one copy to the GPU; ``beside``: a forward computes
        meanwhile. Fewer than ``depth`` may be under way.
        """
        layout = self._layout(variant)
        tokens = batch.num_tokens
        if self._latest is not None and self._latest.under_way:
            self._place = (self._place + 1) % len(self._inputs)
        target = self._inputs[self._place].pointer
        ctypes.memmove(target, head.ctypes.data, LAYER_ARGS.itemsize)
        ctypes.c_int32.from_address(target + NUM_TOKENS_OFFSET).value = tokens
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
        in_bytes, out_bytes = layout.used_bytes(tokens), tokens * self.geometry.output_stride * 2
        fits = self._detour is not None and self._detour.holds(in_bytes, out_bytes)
        self._crossing = self._detour if beside and fits else None
        if self._crossing is not None:
            self._crossing.bring(self._place, arena.pointer("input"), target, in_bytes)
        else:
            copy_to_device(arena.pointer("input"), target, in_bytes, stream)

    def receive(self, num_tokens: int, arena: Arena, stream: Stream) -> Tensor:
        """Start the copy back, wait for it, and return the output, bf16 ``[num_tokens, H]``."""
        return self.begin_receive(num_tokens, arena, stream).result()

    def begin_receive(self, num_tokens: int, arena: Arena, stream: Stream) -> Arrival:
        """Start the copy back of the forward that was sent last."""
        stride = self.geometry.output_stride
        num_bytes = num_tokens * stride * 2
        done = self._done[self._place]
        if (block := self._kept.take(num_bytes)) is not None:
            target = ctypes.addressof(block)
            finish = partial(self._kept.view, block, num_tokens, stride)
        else:
            target = self._outputs[self._place].pointer
            finish = partial(self._copied, target, num_tokens)
        if self._crossing is not None:
            stream = self._crossing.take(self._place, target, arena.pointer("output"), num_bytes)
        else:
            copy_to_host(target, arena.pointer("output"), num_bytes, stream)
        done.record(stream)
        self._latest = Arrival(done, finish, self._enter, lost=None if block is None else self._lost)
        return self._latest

    def _copied(self, source: int, num_tokens: int) -> Tensor:
        """An output in memory of its own."""
        stride, hidden = self.geometry.output_stride, self.geometry.hidden_size
        output = torch.empty(num_tokens, stride, dtype=torch.bfloat16)
        ctypes.memmove(output.data_ptr(), source, output.nbytes)
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
        target = self._inputs[self._place].pointer + layout.fields[name].offset
        ctypes.memmove(target, source.data_ptr(), source.nbytes)

    def close(self) -> None:
        """Free the memory."""
        owned: list[PinnedBuffer | Event | OutputBlocks] = [*self._inputs, *self._outputs, *self._done, self._kept]
        for one in owned:
            one.close()
        if self._detour is not None:
            self._detour.close()
