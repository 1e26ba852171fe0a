"""What the service counts and times as it goes, in a Prometheus registry of its own."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect

from ..layer.errors import EngineFailedError
from .adapters import AdapterRegistry
from .batch import Batch
from .batch_tallies import BatchTallies
from .engine_thread import FlightTimes
from .errors import status_of
from .lifecycle import Lifecycle
from .observed import AdapterState, QueueState, ServiceState, register_process
from .tallies import Counts, Distribution
from .watch import ForwardWatch

SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Histogram bounds, from 50 µs."""


class Metrics:
    """Counts what forwards, batches and loads come to; names are those of ``GET /metrics``.

    Used on the event loop alone, where a scrape reads it too: nothing here locks.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests_in_flight = 0
        self._requests = self._counts(
            "moelet_requests", "Forwards that ended, by layer and outcome", "layer", "outcome"
        )
        self._tokens = self._counts("moelet_tokens", "Tokens of those forwards, once known", "layer", "outcome")
        self._answers = self._counts("moelet_http_responses", "Answers to any request, by status", "code")
        self._ended = self._counts(
            "moelet_connections_ended", "Connections ended for being slow, by what was", "reason"
        )
        self._request_seconds = self._seconds("moelet_request_seconds", "From a forward's headers to its answer")
        self.batches = BatchTallies(self._seconds, self.registry.register)
        self._loads = self._counts("moelet_adapter_loads", "Loads of adapters asked for, by outcome", "outcome")
        self._load_seconds = self._seconds(
            "moelet_adapter_load_seconds", "Of a load that succeeded: reading and checking"
        )
        self._queue = QueueState(lambda: self.requests_in_flight)
        self.registry.register(self._queue)
        register_process(self.registry)

    def watch_queue(
        self,
        requests: Callable[[], int],
        tokens: Callable[[], int],
        adapters: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """Ask these at each scrape how many forwards wait, how many tokens do, and for which adapters."""
        self._queue.requests, self._queue.tokens, self._queue.adapters = requests, tokens, adapters

    def watch_adapters(self, adapters: AdapterRegistry) -> None:
        """Tell of ``adapters`` at each scrape."""
        self.registry.register(AdapterState(adapters, self._queue))

    def watch_service(
        self,
        lifecycle: Lifecycle,
        model: str,
        device: str,
        plans: Mapping[int, Sequence[Mapping[str, Any]]],
        depth: int,
        memory: Mapping[str, int],
    ) -> None:
        """Tell whether forwards are taken and what runs; from ``device`` on it is the engine's."""
        self.registry.register(ServiceState(lifecycle, model, device, memory))
        self.batches.watch_engine(plans, depth)

    def batch_begun(self, batch: Batch) -> None:
        """Count a batch that was formed."""
        self.batches.begun(batch)

    def batch_ended(self, times: FlightTimes, answered: float) -> None:
        """Count the times of a batch that was computed; its forwards had their outputs when it was ``answered``."""
        self.batches.ended(times, answered)

    def adapter_installed(self, seconds: float) -> None:
        """Count the time that it took to put an adapter into its slot."""
        self.batches.install_seconds.observe(seconds)

    def forward(self, came: float | None = None) -> ForwardWatch:
        """Count one forward from its headers, which ``came`` then by ``time.monotonic`` (None: now), to its end."""
        self.requests_in_flight += 1
        return ForwardWatch(self._forward_ended, came)

    def answered(self, status: int) -> None:
        """Count an answer, whatever it was to."""
        self._answers.add(str(status))

    def connection_ended(self, reason: str) -> None:
        """Count a connection that was ended because its client was slow."""
        self._ended.add(reason)

    def watch_connections(self, connections: Callable[[], int]) -> None:
        """Ask this at each scrape how many connections are open."""
        self._queue.connections = connections

    @contextmanager
    def adapter_load(self) -> Iterator[None]:
        """Count one load and its time."""
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._loads.add(outcome_of(error))
            raise
        self._loads.add("ok")
        self._load_seconds.observe(time.perf_counter() - started)

    def _forward_ended(self, watch: ForwardWatch, error: BaseException | None) -> None:
        outcome = "ok" if error is None else outcome_of(error)
        self.requests_in_flight -= 1
        self._requests.add(watch.layer, outcome)
        self._tokens.add(watch.layer, outcome, amount=watch.num_tokens)
        self._request_seconds.observe(watch.seconds)

    def _counts(self, name: str, text: str, *labels: str) -> Counts:
        counts = Counts(name, text, *labels)
        self.registry.register(counts)
        return counts

    def _seconds(self, name: str, text: str) -> Distribution:
        distribution = Distribution(name, f"Seconds: {text}", SECONDS)
        self.registry.register(distribution)
        return distribution


def outcome_of(error: BaseException) -> str:
    """``cancelled`` (the client went away), ``invalid`` (its fault), ``rejected`` (no work taken), ``expired``
    (past its deadline) or ``failed``."""
    if isinstance(error, ClientDisconnect) or not isinstance(error, Exception):
        return "cancelled"
    if isinstance(error, EngineFailedError):
        return "failed"
    status = status_of(error)
    if status < 500:
        return "invalid"
    return {503: "rejected", 504: "expired"}.get(status, "failed")
