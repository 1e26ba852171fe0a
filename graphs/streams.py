"""The streams and events of the process: created once, owned by one object, passed by handle."""

from collections.abc import Callable, Iterator
from typing import Any

from .driver import call, driver, failure
from .hazards import Work


class Stream:
    """One non-blocking driver stream.

    ``tracer`` is set only while the stream is captured: it hears of every launch, copy and fill put on the stream.
    """

    __slots__ = ("handle", "name", "tracer")

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle: Any = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self.tracer: Callable[[Work | None], None] | None = None

    def __int__(self) -> int:
        return int(self.handle)

    def __repr__(self) -> str:
        return f"Stream({self.name})"

    def wait(self, event: "Event") -> None:
        """Hold what comes next on this stream until the latest record of ``event`` is reached."""
        call(driver.cuStreamWaitEvent, self.handle, event.handle, 0)

    def synchronize(self) -> None:
        """Wait on the host for everything put on the stream so far."""
        call(driver.cuStreamSynchronize, self.handle)

    def close(self) -> None:
        """Destroy the stream; a second call does nothing."""
        if self.handle is not None:
            call(driver.cuStreamDestroy, self.handle)
            self.handle = None


class Event:
    """One driver event without timing.

    A wait binds to the latest record at the time of the call, so one event serves layer after layer as long as the
    host's order is record, wait, record, wait. Inside a capture both make edges, and the graph keeps no hold of it.
    """

    __slots__ = ("handle", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle: Any = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)

    def __int__(self) -> int:
        return int(self.handle)

    def __repr__(self) -> str:
        return f"Event({self.name})"

    def record(self, stream: Stream) -> None:
        """Mark the point that ``stream`` has been filled up to."""
        code = driver.cuEventRecord(self.handle, stream.handle)[0]
        if code != 0:
            raise failure(code, "cuEventRecord")

    def synchronize(self) -> None:
        """Wait on the host for the latest record; not for an event last recorded in a capture."""
        call(driver.cuEventSynchronize, self.handle)

    def close(self) -> None:
        """Destroy the event; a second call does nothing."""
        if self.handle is not None:
            call(driver.cuEventDestroy, self.handle)
            self.handle = None


class Streams:
    """The streams of one engine, by name, and ``close`` for all of them.

    ``main`` and ``side`` compute, ``copy`` brings adapters; ``inbound`` and ``outbound`` bring inputs and take outputs
    of forwards that are begun while another computes.
    """

    def __init__(self) -> None:
        self.main = Stream("main")
        self.side = Stream("side")
        self.copy = Stream("copy")
        self.inbound = Stream("inbound")
        self.outbound = Stream("outbound")

    def __iter__(self) -> Iterator[Stream]:
        return iter(vars(self).values())

    def synchronize(self) -> None:
        """Wait on the host for all of them."""
        for stream in self:
            stream.synchronize()

    def close(self) -> None:
        """Destroy the streams; what they still run finishes first."""
        for stream in self:
            stream.close()


class Events:
    """Every event of one engine, by name.

    ``forked``           main -> side: what the gate_up LoRA reads is there
    ``lora_ready``       side -> main: the gate_up LoRA's delta is there
    ``activation_ready`` main -> side: the activation is there, the down LoRA may begin
    ``gemm2_done``       main -> side: the down GEMM's output is there
    ``joined``           side -> main: the side stream has nothing left of this forward
    """

    def __init__(self) -> None:
        self.forked = Event("forked")
        self.lora_ready = Event("lora_ready")
        self.activation_ready = Event("activation_ready")
        self.gemm2_done = Event("gemm2_done")
        self.joined = Event("joined")

    def __iter__(self) -> Iterator[Event]:
        return iter(vars(self).values())

    def close(self) -> None:
        """Destroy the events."""
        for event in self:
            event.close()
