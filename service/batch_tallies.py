"""What batches are like: how full, how padded, captured or eager, and where their time goes."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .batch import Batch
from .engine_thread import FlightTimes
from .tallies import Counts, Distribution

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class BatchTallies:
    """Counts batches as they are begun and as they end; used on the event loop alone.

    ``seconds`` makes and registers a histogram of seconds, ``register`` takes any other collector.
    """

    def __init__(self, seconds: Callable[[str, str], Distribution], register: Callable[[Any], None]) -> None:
        self.queue_seconds = seconds("moelet_queue_seconds", "From a forward's admission to its first batch")
        self.copy_in_seconds = seconds("moelet_copy_in_seconds", "From a batch's turn to its being begun")
        self.compute_seconds = seconds("moelet_compute_seconds", "From then to a batch's output on the host")
        self.copy_out_seconds = seconds("moelet_copy_out_seconds", "From then to its parts handed to their requests")
        self.forward_seconds = seconds("moelet_forward_seconds", "In the engine, one batch: copy in to output")
        self.install_seconds = seconds("moelet_adapter_install_seconds", "Putting one adapter into its slot")
        self.tokens = Distribution("moelet_batch_tokens", "Tokens of a batch", TOKENS)
        self.requests = Distribution("moelet_batch_requests", "Forwards that share a batch", REQUESTS)
        self.padding = Counts("moelet_padding_tokens", "Tokens that batches were padded by to a captured shape")
        self.replays = Counts("moelet_replays", "Replays of captured graphs, by their tokens", "shape")
        self.eager = Counts("moelet_eager_forwards", "Batches that no captured shape held")
        for collector in (self.tokens, self.requests, self.padding, self.replays, self.eager):
            register(collector)
        self._shapes: Mapping[int, Sequence[int]] = {}
        self._computes_at_once = True

    def watch_engine(self, plans: Mapping[int, Sequence[Mapping[str, Any]]], depth: int) -> None:
        """Learn from an engine's ``plans`` which token counts each layer has captured, and from its ``depth`` whether
        it begins a forward before the one before it has ended; else it computes before it says that it began."""
        self._computes_at_once = depth == 1
        self._shapes = {
            layer: sorted(int(row["tokens"]) for row in rows if row.get("captured")) for layer, rows in plans.items()
        }

    def begun(self, batch: Batch) -> None:
        """Count a batch that was formed."""
        parts = batch.parts
        for part in parts:
            if part.first:
                self.queue_seconds.observe(batch.taken_at - part.work.queued_at)
        self.requests.observe(len(parts) if len(parts) == 1 else len({id(part.work) for part in parts}))
        self.tokens.observe(batch.num_tokens)
        shapes = self._shapes.get(batch.parts[0].batch.layer, ())
        place = bisect_left(shapes, batch.num_tokens)
        if place == len(shapes):
            self.eager.add()
        else:
            self.replays.add(str(shapes[place]))
            self.padding.add(amount=shapes[place] - batch.num_tokens)

    def ended(self, times: FlightTimes, answered: float) -> None:
        """Count the times of a batch, if it was computed; ``answered`` by ``time.perf_counter``."""
        if not times.ended:
            return
        begun = times.started if self._computes_at_once else times.begun
        if not self._computes_at_once:
            self.copy_in_seconds.observe(begun - times.started)
        self.compute_seconds.observe(times.ended - begun)
        self.copy_out_seconds.observe(answered - times.ended)
        self.forward_seconds.observe(times.ended - times.started)
