"""The service's own Prometheus metrics, in a registry of its own."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from .adapters import AdapterRegistry
from .batch import Batch
from .errors import status_of

SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Histogram bounds, from 50 µs."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Histogram bounds of a batch's tokens."""

NO_LAYER = "none"
"""The ``layer`` label of a request that named no layer that is served."""


@dataclass(slots=True)
class ForwardWatch:
    """What a running forward tells its metrics once it knows."""

    layer: str = NO_LAYER
    num_tokens: int = 0


class Metrics:
    """Counts what forwards and loads come to; names are those of ``GET /metrics``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("moelet_requests", "Forwards answered, by layer and outcome", "layer", "outcome")
        self.tokens = self._counter("moelet_tokens", "Tokens of forwards answered with 200, by layer", "layer")
        self.adapter_loads = self._counter("moelet_adapter_loads", "Loads asked for, by outcome", "outcome")
        self.in_flight = Gauge("moelet_requests_in_flight", "Forwards being worked on", registry=self.registry)
        self.queue_requests = Gauge(
            "moelet_queue_requests", "Forwards that wait for the engine", registry=self.registry
        )
        self.queue_tokens = Gauge("moelet_queue_tokens", "Tokens of those forwards", registry=self.registry)
        self.request_seconds = self._histogram("moelet_request_seconds", "From a forward's headers to its answer")
        self.forward_seconds = self._histogram("moelet_forward_seconds", "In the engine, one call")
        self.queue_seconds = self._histogram("moelet_queue_seconds", "From a forward's admission to its batch")
        self.copy_in_seconds = self._histogram(
            "moelet_copy_in_seconds", "Until a batch is begun, its adapters in place"
        )
        self.compute_seconds = self._histogram("moelet_compute_seconds", "From then to a batch's output")
        self.batch_tokens = Histogram(
            "moelet_batch_tokens", "Tokens of a batch", buckets=TOKENS, registry=self.registry
        )
        self.adapter_load_seconds = self._histogram("moelet_adapter_load_seconds", "Reading and checking one adapter")

    def watch_queue(self, requests: Callable[[], int], tokens: Callable[[], int]) -> None:
        """Ask these for the queue's size at each scrape."""
        self.queue_requests.set_function(requests)
        self.queue_tokens.set_function(tokens)

    def watch_adapters(self, adapters: AdapterRegistry) -> None:
        """Tell of ``adapters`` at each scrape."""
        self.registry.register(AdapterCollector(adapters))

    def batch_begun(self, batch: Batch) -> None:
        """Count a batch that was formed."""
        self.batch_tokens.observe(batch.num_tokens)
        for part in batch.parts:
            self.queue_seconds.observe(batch.taken_at - part.work.queued_at)

    def batch_ended(self, batch: Batch) -> None:
        """Count the time of a batch that was computed."""
        times = batch.times
        if times.ended:
            self.copy_in_seconds.observe(times.begun - times.installed)
            self.compute_seconds.observe(times.ended - times.begun)
            self.forward_seconds.observe(times.ended - times.started)

    @contextmanager
    def forward(self) -> Iterator[ForwardWatch]:
        """Count one forward from its headers to its answer, or to the error that ends it."""
        watch = ForwardWatch()
        outcome = "cancelled"
        started = time.perf_counter()
        self.in_flight.inc()
        try:
            yield watch
            outcome = "ok"
            self.tokens.labels(watch.layer).inc(watch.num_tokens)
        except Exception as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.in_flight.dec()
            self.requests.labels(watch.layer, outcome).inc()
            self.request_seconds.observe(time.perf_counter() - started)

    @contextmanager
    def adapter_load(self) -> Iterator[None]:
        """Count one load and its time."""
        outcome = "cancelled"
        started = time.perf_counter()
        try:
            yield
            outcome = "ok"
            self.adapter_load_seconds.observe(time.perf_counter() - started)
        except Exception as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.adapter_loads.labels(outcome).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, f"Seconds: {text}", buckets=SECONDS, registry=self.registry)


def outcome_of(error: Exception) -> str:
    """``cancelled`` (the client went away), ``invalid`` (its fault), ``rejected`` (no work taken) or ``failed``."""
    if isinstance(error, ClientDisconnect):
        return "cancelled"
    status = status_of(error)
    if status < 500:
        return "invalid"
    return "rejected" if status == 503 else "failed"


class AdapterCollector(Collector):
    """Reads the adapter bookkeeping when a scrape asks for it."""

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters

    def collect(self) -> Iterable[Metric]:
        """One family a fact; names that are not loaded any more have no series."""
        table = self._adapters.table
        in_flight = GaugeMetricFamily("moelet_adapter_in_flight", "Forwards that hold the adapter", labels=["adapter"])
        for name, count in self._adapters.in_flight_by_name().items():
            in_flight.add_metric([name], count)
        yield in_flight
        yield GaugeMetricFamily("moelet_adapters_loaded", "Adapters that requests may name", value=len(table))
        resident = sum(version is not None for version in table.slot_table())
        yield GaugeMetricFamily("moelet_adapters_in_slots", "Adapter slots that are taken", value=resident)
        evictions = CounterMetricFamily("moelet_adapter_evictions", "Evictions of adapters", labels=["place"])
        evictions.add_metric(["host"], table.host_evictions)
        evictions.add_metric(["slot"], table.slot_evictions)
        yield evictions
        yield CounterMetricFamily("moelet_adapter_installs", "Adapters put into a slot", value=table.installs)
