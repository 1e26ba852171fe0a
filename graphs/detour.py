"""Device memory beside the arena, through which a forward's input and output cross the bus while another computes."""

from collections.abc import Iterable
from typing import NamedTuple

from .memory import DeviceBuffer, copy_on_device, copy_to_device, copy_to_host
from .streams import Event, Stream, Streams


class Run(NamedTuple):
    """``num_bytes`` at ``source``, page-locked memory of the host, that belong at ``offset`` of an input."""

    source: int
    offset: int
    num_bytes: int


class Detour:
    """``depth`` blocks each way, of ``in_bytes`` and ``out_bytes``.

    The arena has one input and one output for all forwards, and the graph ahead still uses them: what crosses the bus
    meanwhile does so on streams of its own, to and from these blocks, and the main stream is left a copy within the
    device. Who calls says which block, by its place: one whose last forward has been waited for.
    """

    def __init__(self, depth: int, in_bytes: int, out_bytes: int, streams: Streams) -> None:
        self.in_bytes, self.out_bytes = in_bytes, out_bytes
        self._streams = streams
        self._inputs = [DeviceBuffer(in_bytes) for _ in range(depth)]
        self._outputs = [DeviceBuffer(out_bytes) for _ in range(depth)]
        self._arrived = [Event(f"arrived {place}") for place in range(depth)]
        self._computed = [Event(f"computed {place}") for place in range(depth)]

    def holds(self, in_bytes: int, out_bytes: int) -> bool:
        """Whether a forward of this size can take it."""
        return in_bytes <= self.in_bytes and out_bytes <= self.out_bytes

    def bring(self, place: int, target: int, runs: Iterable[Run], num_bytes: int) -> None:
        """``num_bytes`` of an input, in ``runs``, to ``target`` on the device, by the time that the main stream gets
        there."""
        main, inbound = self._streams.main, self._streams.inbound
        block, arrived = self._inputs[place].pointer, self._arrived[place]
        for run in runs:
            copy_to_device(block + run.offset, run.source, run.num_bytes, inbound)
        arrived.record(inbound)
        main.wait(arrived)
        copy_on_device(target, block, num_bytes, main)

    def take(self, place: int, target: int, source: int, num_bytes: int) -> Stream:
        """``source`` on the device to pinned ``target``, once the main stream has got there; the stream it ends on."""
        main, outbound = self._streams.main, self._streams.outbound
        block, computed = self._outputs[place].pointer, self._computed[place]
        copy_on_device(block, source, num_bytes, main)
        computed.record(main)
        outbound.wait(computed)
        copy_to_host(target, block, num_bytes, outbound)
        return outbound

    def close(self) -> None:
        """Free the memory and destroy the events."""
        owned: list[DeviceBuffer | Event] = [*self._inputs, *self._outputs, *self._arrived, *self._computed]
        for one in owned:
            one.close()
