"""A forward's way onto the GPU and back: a pinned block that a copy or a kernel reads, and one that either fills."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..layer.engine import LayerBatch
from .arena import Arena
from .arrival import TAKEN, UNDER_WAY, Arrival
from .buffers import InputLayout, RoutingInput
from .detour import Detour, Run
from .fetching import LANE_BYTES, Fetching
from .geometry import Geometry
from .input_block import InputBlock
from .locked_blocks import Block, LockedBlocks
from .memory import PinnedBuffer, copy_to_device, copy_to_host
from .page_locked import PageLocked
from .pool import Variant
from .streams import Event, Stream, Streams
from .transfer import Transfer, plan_transfer

DIRECT_BYTES_ALONE = 1 << 40
"""The largest output of a forward alone that its last kernel itself writes over the bus: of all that have a block.

A copy crosses the bus no faster, begins only when that kernel has ended, and is one call more.
"""
DIRECT_BYTES_BESIDE = 256 << 10
"""The same of a forward that is begun while another computes, whose bus time the next one would wait for.

Of so many bytes that takes about as long as the copy within the device that it saves; of more, that copy is shorter,
and a stream of its own has the output cross the bus.
"""
FETCHED_BYTES = 512 << 10
"""The largest input of a forward alone that a kernel brings; of more, a copy is the faster."""
ASKED_BYTES = 32 << 10
"""The smallest hidden states of which it is asked whether they are page-locked: fewer are copied in less time."""
MOST_LOST = 16
"""Memory that may be read or written at any time, because a forward failed, is held for good: past so many no more is
read from where it is."""


def routing_input(batch: LayerBatch) -> RoutingInput:
    """What ``batch`` is routed by."""
    if batch.topk_ids is not None:
        return RoutingInput.TOPK
    return RoutingInput.GATE if batch.router_logits is None else RoutingInput.LOGITS


class Staging:
    """Pinned memory for the inputs and outputs of the largest shape of one geometry, ``depth`` forwards at a time.

    Tensors go in and out as runs of bytes: nothing here costs time per token but the copies. Hidden states that are
    page-locked already, as ``page_locked`` says, are brought from where they are. Outputs of up to ``kept_tokens``
    tokens are not copied out of pinned memory, unless too many are held by who asked for them.
    A forward goes through the memory of the last one if that was waited for, else through the next: however many
    forwards follow each other, or fail, while one ahead of them is still to be waited for, that one's memory is left
    alone.
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
        fetching: Fetching | None = None,
        page_locked: PageLocked | None = None,
    ) -> None:
        self.geometry = geometry
        self._enter = enter
        self._fetching = fetching
        self._page_locked = page_locked
        in_bytes = max(InputLayout(geometry, max_tokens, routing).total_bytes for routing in RoutingInput)
        no_slots = torch.full((max_tokens,), -1, dtype=torch.int32)
        self._inputs = [InputBlock(in_bytes, no_slots) for _ in range(depth)]
        self._outputs = [PinnedBuffer(max(max_tokens * geometry.output_stride * 2, 2)) for _ in range(depth)]
        self._done = [Event(f"done {place}") for place in range(depth)]
        self._columns = geometry.output_stride
        row_bytes = self._columns * 2
        keeps = kept_tokens > 0 and self._columns == geometry.hidden_size  # rows as they are asked for
        self._kept = LockedBlocks(self.kept_blocks if keeps else 0, max(kept_tokens, 1) * row_bytes)
        self._lost: list[Tensor] = []
        self._detour: Detour | None = None
        if streams is not None:
            crossing = max(InputLayout(geometry, kept_tokens, routing).total_bytes for routing in RoutingInput)
            self._detour = Detour(depth, crossing, kept_tokens * row_bytes, streams)
        self._place = 0  # of the forward that was sent last,
        self._taken = 0  # and of the last whose output was asked for: one that was not leaves nothing behind
        self._arrivals: list[Arrival | None] = [None] * depth  # the last in each place
        self._crossing: Detour | None = None  # what the forward that was sent last goes through
        self._written: Block | None = None  # what its last kernel writes,
        self._read: Tensor | None = None  # and what it reads from the caller's own memory
        self._pads = geometry.hidden_stride != geometry.hidden_size
        self._hidden = torch.zeros(max_tokens, geometry.hidden_stride, dtype=torch.bfloat16)

    def transfer(self, variant: Variant, arena: Arena, num_tokens: int) -> Transfer:
        """What ``send`` and ``receive`` are told of forwards of ``num_tokens`` by ``variant`` in ``arena``."""
        planned = plan_transfer(self.geometry, variant, arena, num_tokens)
        if self._fetching is None or planned.in_bytes > FETCHED_BYTES:
            return planned
        sizes = planned.input, planned.hidden.offset, planned.in_bytes
        fetches = [self._fetching.prepare(block.device_address, *sizes) for block in self._inputs]
        return replace(planned, fetches=tuple(fetches))

    def send(
        self,
        batch: LayerBatch,
        head: bytes,
        transfer: Transfer,
        stream: Stream,
        *,
        beside: bool = False,
        direct: bool = False,
    ) -> None:
        """Write ``batch``, which was checked, behind the layer's ``head``, and have it brought to the GPU.

        ``beside``: a forward computes meanwhile. ``direct``: the last kernel may write the output to where it is kept,
        hidden states may be read from where they are, and ``begin_receive`` follows, once all was launched. Fewer than
        ``depth`` may be under way.
        """
        self._place = self._next_place()
        self._crossing = self._beside(transfer) if beside else None
        self._written = None
        if direct and transfer.out_bytes <= (DIRECT_BYTES_BESIDE if beside else DIRECT_BYTES_ALONE):
            self._written = self._kept.take(transfer.out_bytes)
        block = self._inputs[self._place]
        block.write(head, 0 if self._written is None else self._written.device, batch, transfer)
        hidden = (self._padded(batch.hidden_states) if self._pads else batch.hidden_states).contiguous()
        if self._read is not None:  # by one that was sent and no more
            self._lost.append(self._read)
        reached = self._reached(hidden, transfer.hidden.num_bytes) if direct else 0
        self._read = hidden if reached else None
        if not reached:
            block.write_hidden(hidden, transfer.hidden)
        if self._crossing is None and transfer.fetches:
            transfer.fetches[self._place].launch(reached)
        else:
            self._copy(transfer, hidden.data_ptr() if reached else 0, stream)

    def _beside(self, transfer: Transfer) -> Detour | None:
        """What a forward goes through that is begun while another computes."""
        detour = self._detour
        return detour if detour is not None and detour.holds(transfer.in_bytes, transfer.out_bytes) else None

    def _reached(self, hidden: Tensor, num_bytes: int) -> int:
        """The device's address of ``hidden`` where it may be read there, else 0."""
        locked = self._page_locked
        if num_bytes < ASKED_BYTES or locked is None or self._pads or len(self._lost) >= MOST_LOST:
            return 0
        address = hidden.data_ptr()
        return 0 if address % LANE_BYTES else locked.device_address(address, num_bytes)

    def _copy(self, transfer: Transfer, hidden: int, stream: Stream) -> None:
        """Bring the input by copies; hidden states are at ``hidden``, or in the block where that is 0."""
        block, offset = self._inputs[self._place].address, transfer.hidden.offset
        runs: Sequence[Run] = (Run(block, 0, transfer.in_bytes),)
        if hidden:
            runs = Run(block, 0, offset), Run(hidden, offset, transfer.hidden.num_bytes)
        if self._crossing is not None:
            self._crossing.bring(self._place, transfer.input, runs, transfer.in_bytes)
            return
        for run in runs:
            copy_to_device(transfer.input + run.offset, run.source, run.num_bytes, stream)

    def receive(self, transfer: Transfer, stream: Stream) -> Tensor:
        """Bring back the output, wait for it, and return it, bf16 ``[num_tokens, H]``."""
        return self.begin_receive(transfer, stream).result()

    def begin_receive(self, transfer: Transfer, stream: Stream) -> Arrival:
        """Start the copy back of the forward that was sent last, unless its last kernel writes to where it is kept."""
        tokens, num_bytes, written = transfer.num_tokens, transfer.out_bytes, self._written
        place = self._taken = self._place
        reads, self._read, self._written = self._read, None, None
        block = written or self._kept.take(num_bytes)
        if block is not None:
            target = block.host
            finish = partial(self._kept.rows, block, tokens, self._columns)
        else:
            target = self._outputs[place].pointer
            finish = partial(self._copied, target, tokens)
        done = self._done[place]
        before = self._arrivals[place]
        if before is not None and before.reads is not None:  # it was not waited for to its end
            self._lost.append(before.reads)
        lost = None if block is None else self._lost
        arrival = self._arrivals[place] = Arrival(done, finish, self._enter, lost=lost, reads=reads)
        if written is None and self._crossing is not None:
            stream = self._crossing.take(place, target, transfer.output, num_bytes)
        elif written is None:
            copy_to_host(target, transfer.output, num_bytes, stream)
        done.record(stream)
        arrival.state = UNDER_WAY
        return arrival

    def _next_place(self) -> int:
        """That of the forward whose output was asked for last, if it was taken, else the next that can be had."""
        if self._state(self._taken) == TAKEN:
            return self._taken
        depth = len(self._arrivals)
        following = (self._taken + 1) % depth
        return following if self._state(following) == TAKEN else min(range(depth), key=self._state)

    def _state(self, place: int) -> int:
        arrival = self._arrivals[place]
        return TAKEN if arrival is None else arrival.state

    def _copied(self, source: int, num_tokens: int) -> Tensor:
        """An output in memory of its own."""
        stride, hidden = self.geometry.output_stride, self.geometry.hidden_size
        output = torch.empty(num_tokens, stride, dtype=torch.bfloat16)
        ctypes.memmove(output.data_ptr(), source, output.nbytes)
        return output if stride == hidden else output[:, :hidden].clone()

    def _padded(self, hidden: Tensor) -> Tensor:
        """Hidden states at the kernels' stride; what lies beyond H stays zero."""
        tokens, width = hidden.shape
        self._hidden[:tokens, :width] = hidden
        return self._hidden[:tokens]

    def close(self) -> None:
        """Free the memory."""
        owned: list[InputBlock | PinnedBuffer | Event | LockedBlocks] = [*self._inputs, *self._outputs, *self._done]
        for one in (*owned, self._kept):
            one.close()
        if self._detour is not None:
            self._detour.close()
