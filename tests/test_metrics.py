"""The metrics as Prometheus reads them: names, types and numbers, and what counting costs."""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect

from moelet.layer.errors import EngineError, EngineFailedError, RequestError
from moelet.service.errors import UnavailableError
from moelet.service.lifecycle import Lifecycle
from moelet.service.metrics import SECONDS, Metrics, outcome_of
from moelet.service.tallies import Counts, Distribution
from running_service import RunningService, hidden_states
from source_tree import ROOT

OF_OTHERS = re.compile(r"(vllm:|process_|python_)")
"""Names that others have given, and readers look for."""

UNITS = ("seconds", "bytes", "total", "info", "tokens", "requests")
COUNTED = re.compile(
    r"moelet_(ready|adapters?_(loaded|slots|in_slots|in_flight)|requests_in_flight|queue_requests|connections)$"
)


def scrape(service: RunningService) -> dict[str, Metric]:
    """Every family as Prometheus's own parser reads it."""
    text = service.client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(service: RunningService, name: str) -> dict[tuple[str, ...], float]:
    """The values of one family's samples, by their labels' values."""
    return {tuple(sample.labels.values()): sample.value for sample in scrape(service)[name].samples}


def test_names_and_types_follow_the_conventions(running_service: RunningService) -> None:
    """What promtool's lint asks for: help, no type in names, base units, ``_total`` on counters and nothing else."""
    running_service.output(hidden_states=hidden_states(1))
    families = scrape(running_service)
    for name, family in families.items():
        assert family.documentation.strip(), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert not re.search(r"(counter|gauge|histogram|summary|milli|micro|_ms|_us|_mb|kilo)", name), name
        series = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert all(sample.endswith("_total") for sample in series), name
        else:
            assert not any(sample.endswith("_total") for sample in series), name
        if not OF_OTHERS.match(name):
            assert re.fullmatch(r"moelet_[a-z0-9_]+", name), name
            assert family.type == "counter" or COUNTED.match(name) or name.rpartition("_")[2] in UNITS, name
    assert len({family.documentation for family in families.values()}) == len(families)


def test_histograms_add_up(running_service: RunningService) -> None:
    running_service.output(hidden_states=hidden_states(2))
    histograms = [family for family in scrape(running_service).values() if family.type == "histogram"]
    assert {"moelet_request_seconds", "moelet_forward_seconds", "moelet_queue_seconds"} <= {h.name for h in histograms}
    for family in histograms:
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        counts = [sample.value for sample in buckets]
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert counts == sorted(counts)
        assert counts[-1] == next(sample.value for sample in family.samples if sample.name.endswith("_count"))
        if family.name.endswith("_seconds"):
            assert tuple(bounds[:-1]) == SECONDS


def test_requests_and_tokens_by_layer_and_outcome(running_service: RunningService) -> None:
    service = running_service
    before = samples(service, "moelet_requests"), samples(service, "moelet_tokens")
    service.output(hidden_states=hidden_states(3))
    service.output(layer=3, hidden_states=hidden_states(2))
    service.forward(hidden_states=hidden_states(5), adapter="absent")
    service.forward(hidden_states="no")
    service.forward(7, hidden_states=[])
    with service.engine.failing(EngineError("broken")):
        service.forward(hidden_states=hidden_states(4))
    after = samples(service, "moelet_requests"), samples(service, "moelet_tokens")
    requests, tokens = ({k: v - b.get(k, 0) for k, v in a.items()} for b, a in zip(before, after, strict=True))
    assert {key: value for key, value in requests.items() if value} == {
        ("1", "ok"): 1,
        ("3", "ok"): 1,
        ("1", "invalid"): 2,
        ("none", "invalid"): 1,
        ("1", "failed"): 1,
    }
    assert {key: value for key, value in tokens.items() if value} == {
        ("1", "ok"): 3,
        ("3", "ok"): 2,
        ("1", "invalid"): 5,
        ("1", "failed"): 4,
    }


def test_answers_are_counted_by_status(running_service: RunningService) -> None:
    before = samples(running_service, "moelet_http_responses")
    running_service.client.get("/nothing")
    running_service.client.patch("/v1/adapters/a")
    running_service.client.get("/v2/nothing")
    after = samples(running_service, "moelet_http_responses")
    counted = {code: after[code] - before.get(code, 0) for code in after}
    assert {code: count for code, count in counted.items() if count} == {("404",): 2, ("405",): 1, ("200",): 1}


def test_adapters_and_what_gateways_read_of_vllm(running_service: RunningService) -> None:
    service = running_service
    for name in ("a", "b"):
        assert service.load(name, service.write(f"metrics-{name}", 5)).status_code == 200
    service.output(hidden_states=hidden_states(1), adapter="a")
    assert scrape(service)["vllm:lora_requests_info"].samples[0].labels == {
        "max_lora": "3",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    before = {name: samples(service, f"moelet_{name}") for name in ("eager_forwards", "adapter_installs")}
    with service.engine.closed(), ThreadPoolExecutor(2) as pool:
        pool.submit(service.forward, hidden_states=hidden_states(1), adapter="a")
        assert service.engine.waiting.wait(5)
        pool.submit(service.forward, hidden_states=hidden_states(1), adapter="b")
        deadline = time.monotonic() + 10
        while samples(service, "vllm:num_requests_waiting")[()] == 0:
            assert time.monotonic() < deadline
        families = scrape(service)
        [info] = families["vllm:lora_requests_info"].samples
        assert info.labels == {"max_lora": "3", "running_lora_adapters": "a", "waiting_lora_adapters": "b"}
        assert abs(info.value - time.time()) < 60
        assert families["vllm:num_requests_running"].samples[0].value == 1
        service.engine.gate.set()
    after = {name: samples(service, f"moelet_{name}") for name in before}
    assert [after[name][()] - before[name][()] for name in before] == [2, 1]
    assert service.metric("moelet_adapter_install_seconds_count") == after["adapter_installs"][()]
    families = scrape(service)
    values = {name: families[name].samples[0].value for name in families if name.startswith("moelet_adapter")}
    assert values["moelet_adapters_loaded"] == 2
    assert values["moelet_adapters_in_slots"] == 2
    assert values["moelet_adapter_slots"] == 3
    assert values["moelet_adapter_host_bytes"] == sum(record["bytes"] for record in service.records())
    assert samples(service, "moelet_adapter_in_flight") == {("a",): 0, ("b",): 0}
    service.unload_all()
    assert samples(service, "moelet_adapter_in_flight") == {}


def test_the_process_and_what_runs(running_service: RunningService) -> None:
    families = scrape(running_service)
    assert families["process_resident_memory_bytes"].samples[0].value > 1e7
    assert families["process_open_fds"].samples[0].value > 3
    [build] = families["moelet_build_info"].samples
    assert (build.value, build.labels["model"], build.labels["device"]) == (1, "small", "cpu")
    assert build.labels.keys() == {"version", "python", "torch", "model", "device"}
    assert samples(running_service, "moelet_ready") == {(): 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClientDisconnect(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (RequestError("x"), "invalid"),
        (UnavailableError("x"), "rejected"),
        (EngineFailedError("x"), "failed"),
        (EngineError("x"), "failed"),
        (ValueError("x"), "failed"),
    ],
)
def test_outcomes(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_tallies_say_what_the_library_s_metrics_say() -> None:
    """The same numbers into both, compared as text."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts, distribution = Counts("a", "A.", "x", "y"), Distribution("b", "B.", SECONDS)
    ours.register(counts)
    ours.register(distribution)
    counter, histogram = Counter("a", "A.", ["x", "y"], registry=theirs), Histogram("b", "B.", buckets=SECONDS)
    theirs.register(histogram)
    for i, value in enumerate([0.0, 5e-5, 6e-5, 0.3, 10.0, 11.0, 1e9, 1e-9]):
        counts.add(str(i % 2), 'quote " and \n', amount=value)
        counter.labels(str(i % 2), 'quote " and \n').inc(value)
        distribution.observe(value)
        histogram.observe(value)
    texts = [generate_latest(registry).decode().splitlines() for registry in (ours, theirs)]
    assert texts[0] == [line for line in texts[1] if "_created" not in line]


def batch(layer: int, num_tokens: int, waits: Sequence[float], **times: float) -> Any:
    """A batch as the metrics see it, of forwards that enter their first."""
    here, works = SimpleNamespace(layer=layer), [SimpleNamespace(queued_at=10 - w) for w in waits]
    parts = [SimpleNamespace(batch=here, work=work, first=True) for work in works]
    moments = {"started": 0.0, "begun": 0.0, "ended": 0.0} | times
    return SimpleNamespace(parts=parts, num_tokens=num_tokens, taken_at=10.0, times=SimpleNamespace(**moments))


def test_batches_of_captured_and_other_shapes() -> None:
    metrics = Metrics()
    captured = [{"tokens": 8, "captured": True}, {"tokens": 2, "captured": True}, {"tokens": 64, "captured": False}]
    eager = [{"tokens": 64, "captured": False}]
    memory = {"weights": 5, "graphs": 7}
    metrics.watch_service(Lifecycle(), "m", "cuda:0", {0: captured, 1: eager}, depth=2, memory=memory)
    for layer, tokens in ((0, 1), (0, 2), (0, 3), (0, 8), (0, 9), (1, 5)):
        metrics.batch_begun(batch(layer, tokens, [0.5, 0.25]))
    now = time.perf_counter()
    metrics.batch_ended(batch(0, 1, [0], started=now - 3, begun=now - 2, ended=now - 1).times, now)
    metrics.adapter_installed(1.0)
    metrics.batch_ended(batch(0, 1, [0]).times, now)  # one that failed
    text = generate_latest(metrics.registry).decode()
    values = {
        s.name + str([*s.labels.values()]): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert [values[f"moelet_replays_total['{shape}']"] for shape in (2, 8)] == [2, 2]
    assert {use: values[f"moelet_gpu_memory_bytes['{use}']"] for use in memory} == memory
    assert values["moelet_eager_forwards_total[]"] == 2
    assert values["moelet_padding_tokens_total[]"] == (2 - 1) + (8 - 3)
    assert (values["moelet_batch_tokens_sum[]"], values["moelet_batch_requests_sum[]"]) == (28, 12)
    assert (values["moelet_queue_seconds_sum[]"], values["moelet_queue_seconds_count[]"]) == (4.5, 12)
    for name, seconds in {"forward": 2, "copy_in": 1, "compute": 1, "copy_out": 1, "adapter_install": 1}.items():
        assert values[f"moelet_{name}_seconds_count[]"] == 1
        assert values[f"moelet_{name}_seconds_sum[]"] == pytest.approx(seconds, abs=0.5)


def test_an_engine_that_computes_at_once_has_no_copy_in() -> None:
    metrics = Metrics()
    metrics.watch_service(Lifecycle(), "m", "cpu", {}, depth=1, memory={})
    now = time.perf_counter()
    metrics.batch_ended(batch(0, 1, [0], started=now - 3, begun=now, ended=now).times, now)
    read = metrics.registry.get_sample_value
    assert (read("moelet_copy_in_seconds_count"), read("moelet_compute_seconds_count")) == (0, 1)
    assert read("moelet_compute_seconds_sum") == pytest.approx(3)


def test_counting_costs_microseconds() -> None:
    """A forward that is a batch of its own; the limit is generous to a busy machine."""
    metrics = Metrics()

    alone = batch(1, 3, [0.1], started=1, begun=1, ended=2)

    def forward() -> None:
        with metrics.forward() as watch:
            watch.layer, watch.num_tokens = "1", 3
        metrics.batch_begun(alone)
        metrics.batch_ended(alone.times, 3)
        metrics.answered(200)

    def took() -> float:
        started = time.perf_counter()
        for _ in range(1000):
            forward()
        return (time.perf_counter() - started) / 1000

    assert min(took() for _ in range(10)) < 30e-6


def test_every_metric_is_explained(running_service: RunningService) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    families = scrape(running_service)
    named = {name + "_total" if family.type == "counter" else name for name, family in families.items()}
    assert {name for name in named if not name.startswith("python_") and f"`{name}" not in text} == set()
