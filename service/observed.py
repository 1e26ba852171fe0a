"""What is not counted but looked at when a scrape asks: the queue, adapters, the process, and what it serves."""

import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from .adapters import AdapterRegistry
from .lifecycle import Lifecycle


class QueueState(Collector):
    """Forwards in flight, and those of them that wait: nothing of them has entered a batch yet; under the names of
    vLLM's gauges too, which inference gateways look for.

    ``requests``      how many wait
    ``adapters``      the names of adapters that they wait with
    ``tokens``        how many wait for a batch, of forwards too of which others are being computed
    ``connections``   how many are open
    """

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self.in_flight = in_flight
        self.requests: Callable[[], int] = lambda: 0
        self.tokens: Callable[[], int] = lambda: 0
        self.adapters: Callable[[], Collection[str]] = lambda: ()
        self.connections: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Metric]:
        """The queue as it is."""
        in_flight, waiting = self.in_flight(), self.requests()
        yield GaugeMetricFamily("moelet_requests_in_flight", "Forwards being worked on", value=in_flight)
        yield GaugeMetricFamily("moelet_queue_requests", "Forwards that wait for their first batch", value=waiting)
        yield GaugeMetricFamily("moelet_queue_tokens", "Tokens that wait for a batch", value=self.tokens())
        yield GaugeMetricFamily("moelet_connections", "Open connections", value=self.connections())
        running = max(0, in_flight - waiting)
        yield GaugeMetricFamily("vllm:num_requests_running", "Forwards in flight that do not wait", value=running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "As moelet_queue_requests", value=waiting)


class AdapterState(Collector):
    """The adapter bookkeeping; names that are not loaded any more have no series."""

    def __init__(self, adapters: AdapterRegistry, queue: QueueState) -> None:
        self._adapters = adapters
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        """One family a fact."""
        table, in_flight = self._adapters.table, self._adapters.in_flight_by_name()
        by_name = GaugeMetricFamily("moelet_adapter_in_flight", "Forwards that hold the adapter", labels=["adapter"])
        for name, count in in_flight.items():
            by_name.add_metric([name], count)
        yield by_name
        available, held = len(table.all_available()), sum(version.adapter.facts.nbytes for version in table)
        yield GaugeMetricFamily("moelet_adapters_loaded", "Adapters that requests may name", value=available)
        yield GaugeMetricFamily("moelet_adapter_host_bytes", "Host memory of all adapters", value=held)
        resident = sum(version is not None for version in table.slot_table())
        yield GaugeMetricFamily("moelet_adapter_slots", "Adapter slots of the engine", value=table.max_loras)
        yield GaugeMetricFamily("moelet_adapters_in_slots", "Adapter slots that are taken", value=resident)
        evictions = CounterMetricFamily("moelet_adapter_evictions", "Evictions of adapters", labels=["place"])
        evictions.add_metric(["host"], table.host_evictions)
        evictions.add_metric(["slot"], table.slot_evictions)
        yield evictions
        yield CounterMetricFamily("moelet_adapter_installs", "Adapters put into a slot", value=table.installs)
        yield self._lora_requests(table.max_loras, in_flight)

    def _lora_requests(self, max_loras: int, in_flight: dict[str, int]) -> Metric:
        """What gateways that route by adapter read of vLLM: names joined by commas as labels, now as the value."""
        waiting = set(self._queue.adapters())
        running = sorted(name for name, count in in_flight.items() if count and name not in waiting)
        labels = {
            "max_lora": str(max_loras),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of forwards in flight", labels=list(labels))
        family.add_metric(list(labels.values()), time.time())
        return family


class ServiceState(Collector):
    """Whether forwards are taken, and what runs; ``memory`` of a GPU in bytes, by what it is for."""

    def __init__(self, lifecycle: Lifecycle, model: str, device: str, memory: Mapping[str, int]) -> None:
        self._lifecycle = lifecycle
        self._memory = memory
        self._build = {
            "version": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": model,
            "device": device,
        }

    def collect(self) -> Iterable[Metric]:
        """All of it."""
        yield GaugeMetricFamily("moelet_ready", "1 while forwards are taken, else 0", value=self._lifecycle.ready)
        taken = GaugeMetricFamily("moelet_gpu_memory_bytes", "GPU memory that the engine has taken", labels=["use"])
        for use, num_bytes in self._memory.items():
            taken.add_metric([use], num_bytes)
        yield taken
        yield InfoMetricFamily("moelet_build", "What runs and what it serves", value=self._build)


def register_process(registry: CollectorRegistry) -> None:
    """Have ``registry`` tell of the process: CPU seconds, memory, descriptors, and Python's garbage collector."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
