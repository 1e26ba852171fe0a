"""Times of replays on the GPU by pairs of driver events, and what is reported of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moelet.graphs.driver import call, driver
from moelet.graphs.streams import Stream

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one forward over many replays."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> "Timing":
        """The median and the outer deciles of at least two times."""
        deciles = statistics.quantiles(microseconds, n=10, method="inclusive")
        return cls(statistics.median(microseconds), deciles[0], deciles[-1])

    def row(self) -> dict[str, float]:
        """As results hold it."""
        return {"us": round(self.median, 2), "p10_us": round(self.p10, 2), "p90_us": round(self.p90, 2)}


class TimingEvent:
    """One driver event with timing; those of an engine have none, which makes them cheaper."""

    def __init__(self) -> None:
        self._handle: Any = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DEFAULT.value)

    def record(self, stream: Stream) -> None:
        """Mark the point that ``stream`` has been filled up to."""
        call(driver.cuEventRecord, self._handle, stream.handle)

    def microseconds_to(self, later: "TimingEvent") -> float:
        """GPU time from this event to ``later``, both reached."""
        return float(call(driver.cuEventElapsedTime, self._handle, later._handle)) * 1e3

    def close(self) -> None:
        """Destroy the event."""
        call(driver.cuEventDestroy, self._handle)


def replay_times(
    stream: Stream, replay: Callable[[], None], before: Callable[[], None], *, replays: int, forwards: int
) -> list[float]:
    """Microseconds of one of the ``forwards`` in each replay; ``before`` is put on ``stream`` ahead of each, untimed.

    Nothing waits on the host between replays. While ``before`` runs, the host is already done with the replay behind
    it, so that no time of the host's is in the result.
    """
    for _ in range(WARM_UP):
        before()
        replay()
    stream.synchronize()
    pairs = [(TimingEvent(), TimingEvent()) for _ in range(replays)]
    for start, end in pairs:
        before()
        start.record(stream)
        replay()
        end.record(stream)
    stream.synchronize()
    times = [start.microseconds_to(end) / forwards for start, end in pairs]
    for event in (event for pair in pairs for event in pair):
        event.close()
    return times
