"""What goes wrong under the service: a failing engine, install or start, an overlong body, a client that leaves."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from adapter_readers import no_descriptor_left
from eventually import eventually
from moelet.layer.adapter import Adapter
from moelet.layer.engine import Engine
from moelet.layer.errors import EngineError, EngineFailedError
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import ModelSpec
from moelet.layer.weights import LayerWeights
from moelet.service import adapters
from moelet.service.engine_thread import EngineThread
from moelet.service.errors import UnavailableError
from moelet.service.lifecycle import Lifecycle
from running_service import MAX_BODY_BYTES, OpenEngine, RunningService, hidden_states, running


class FragileEngine(ReferenceEngine):
    """Refuses to install while ``broken``; remembers what it was told to remove."""

    broken = False

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.removed: list[int] = []

    def install_adapter(self, slot: int, adapter: Adapter) -> None:
        if self.broken:
            raise EngineError("out of memory while copying an adapter")
        super().install_adapter(slot, adapter)

    def remove_adapter(self, slot: int) -> None:
        self.removed.append(slot)
        super().remove_adapter(slot)


@pytest.fixture(scope="module")
def open_engine() -> OpenEngine:
    def opened(model: ModelSpec, weights: Mapping[int, LayerWeights], max_loras: int, max_lora_rank: int) -> Engine:
        return FragileEngine(model, weights, max_loras=max_loras, max_lora_rank=max_lora_rank)

    return opened


@pytest.fixture
def service(running_service: RunningService) -> Iterator[RunningService]:
    yield running_service
    running_service.unload_all()


def fragile(service: RunningService) -> FragileEngine:
    assert isinstance(service.engine.engine, FragileEngine)
    return service.engine.engine


def test_an_adapter_that_cannot_be_installed_leaves_its_slot(service: RunningService) -> None:
    service.load("a", service.write("fragile-a", 1))
    hidden = hidden_states(2)
    fragile(service).broken = True
    try:
        assert service.forward(hidden_states=hidden, adapter="a").status_code == 500
    finally:
        fragile(service).broken = False
    assert [(r["slot"], r["in_flight"]) for r in service.records()] == [(None, 0)]
    changed = service.output(hidden_states=hidden, adapter="a")
    assert not torch.equal(changed, service.output(hidden_states=hidden))
    assert service.records()[0]["slot"] is not None


def test_slots_of_adapters_that_are_gone_are_cleared(service: RunningService) -> None:
    service.load("a", "good")
    service.output(hidden_states=hidden_states(1), adapter="a")
    slot = service.records()[0]["slot"]
    fragile(service).removed.clear()
    service.client.delete("/v1/adapters/a")
    eventually(lambda: fragile(service).removed == [slot])


def test_a_slot_that_the_next_version_takes_is_not_cleared_first(service: RunningService) -> None:
    """Which would take as long as to put that there."""
    service.load("a", "good")
    service.output(hidden_states=hidden_states(1), adapter="a")
    slot = service.records()[0]["slot"]
    fragile(service).removed.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters, "CLEAR_S", 1.0)
        for _ in range(3):
            service.load("a", "good", load_inplace=True)
            service.output(hidden_states=hidden_states(1), adapter="a")
    assert service.records()[0]["slot"] == slot
    time.sleep(1.1)
    assert fragile(service).removed == []


def test_a_client_that_leaves_gives_its_adapter_back(service: RunningService) -> None:
    service.load("a", "good")
    body = b'{"hidden_states": [[' + b",".join([b"0"] * 48) + b']], "adapter": "a"}'
    head = f"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = service.client.base_url
    with service.engine.closed(), socket.create_connection((url.host, url.port)) as client:
        client.sendall(head + body)
        assert service.engine.waiting.wait(5)
        assert service.records()[0]["in_flight"] == 1
    eventually(lambda: service.records()[0]["in_flight"] == 0)


def test_half_a_body_holds_nothing(service: RunningService) -> None:
    url = service.client.base_url
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: service.metric("moelet_requests_in_flight") == 1)
    eventually(lambda: service.metric("moelet_requests_in_flight") == 0)
    assert service.metric("moelet_requests_total", layer="1", outcome="cancelled") == 1


@pytest.mark.parametrize(
    "head", [f"Content-Length: {MAX_BODY_BYTES + 1}", "Transfer-Encoding: chunked", "Content-Length: " + "9" * 30]
)
def test_an_overlong_body_is_refused_before_it_is_read_and_ends_the_connection(
    service: RunningService, head: str
) -> None:
    url = service.client.base_url
    with socket.create_connection((url.host, url.port), timeout=10) as client:
        client.sendall(f"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        if "chunked" in head:
            size = MAX_BODY_BYTES // 2 + 1
            for _ in range(2):
                client.sendall(f"{size:x}\r\n".encode() + b" " * size + b"\r\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ") or (b"9" * 30 in head.encode() and answer.startswith(b"HTTP/1.1 400 "))
    assert b"connection: close" in answer.lower()


def test_an_engine_that_failed_for_good_answers_nothing_more(open_engine: OpenEngine) -> None:
    with running(open_engine, None) as service:
        with service.engine.failing(EngineFailedError("the device fell off the bus")):
            failed = service.forward(hidden_states=hidden_states(1))
        assert (failed.status_code, failed.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        eventually(lambda: service.client.get("/health").status_code == 503)
        assert service.client.get("/ready").status_code == 503
        forwards = service.engine.forwards
        assert service.forward(hidden_states=hidden_states(1)).status_code == 503
        assert service.engine.forwards == forwards
        assert "fell off the bus" in service.client.get("/health").json()["error"]["message"]


def test_draining_refuses_new_forwards_and_finishes_old_ones(open_engine: OpenEngine) -> None:
    with running(open_engine, None) as service, ThreadPoolExecutor() as pool:
        with service.engine.closed():
            old = pool.submit(service.forward, hidden_states=hidden_states(1))
            assert service.engine.waiting.wait(5)
            service.service.lifecycle.begin_drain()
            refused = service.forward(hidden_states=hidden_states(1))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert service.client.get("/ready").status_code == 503
            assert service.client.get("/health").status_code == 200
        assert old.result().status_code == 200


def held_up(service: RunningService) -> tuple[threading.Event, threading.Event]:
    """Have adapters be read only once the second of two events is set; the first one is, once a load has begun."""
    begun, go_on = threading.Event(), threading.Event()
    reader = service.service.adapters._reading._here
    read = reader._read

    def slow(folder: Path, root: Path) -> Adapter:
        begun.set()
        assert go_on.wait(30)
        return read(folder, root)

    reader._read = slow
    return begun, go_on


def test_a_load_beyond_those_that_may_wait_is_refused(open_engine: OpenEngine, tmp_path: Path) -> None:
    """However it is spelled; nothing but loads notices, and there is room again once they have ended."""
    with (
        running(open_engine, tmp_path) as service,
        ThreadPoolExecutor() as pool,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(adapters, "MOST_LOADS", 3)
        assert service.load("a", service.write("a", 1)).status_code == 200
        begun, go_on = held_up(service)
        loading = [pool.submit(service.load, name, "a") for name in ("b", "c", "c")]
        assert begun.wait(10)
        eventually(lambda: service.service.adapters._loads == 3)
        config = json.dumps({"lora_path": "a"})
        refused = [
            service.load("d", "a"),
            service.client.put("/v1/adapters/d", json={"path": "a"}),
            service.client.post("/v2/repository/models/d/load", json={"parameters": {"config": config}}),
        ]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "1")] * 3
        assert service.metric("moelet_adapter_loads_total", outcome="rejected") == 3
        assert service.forward(hidden_states=hidden_states(1), adapter="a").status_code == 200
        assert service.client.delete("/v1/adapters/a").status_code == 200
        go_on.set()
        assert sorted(future.result().status_code for future in loading) == [200, 200, 400]
        assert service.load("d", "a").status_code == 200


def test_a_load_while_no_file_can_be_opened_may_come_again(service: RunningService) -> None:
    assert service.load("a", "good").status_code == 200
    before = service.records()
    with no_descriptor_left():
        refused = service.load("a", "good", load_inplace=True)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "Too many open files" in refused.json()["error"]["message"]
    assert service.records() == before
    assert service.load("a", "good", load_inplace=True).status_code == 200


def test_draining_finishes_loads_that_began_and_takes_no_others(open_engine: OpenEngine, tmp_path: Path) -> None:
    with running(open_engine, tmp_path) as service, ThreadPoolExecutor() as pool:
        for name in ("a", "b"):
            assert service.load(name, service.write(name, 1)).status_code == 200
        begun, go_on = held_up(service)
        loading = pool.submit(service.load, "c", "a")
        assert begun.wait(10)
        service.service.lifecycle.begin_drain()
        assert service.service.lifecycle.in_flight == 1
        before = service.records()
        refused = [
            service.load("d", "a"),
            service.client.put("/v1/adapters/a", json={"path": "b"}),
            service.client.delete("/v1/adapters/a"),
            service.client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}),
        ]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "1")] * 4
        assert service.records() == before
        go_on.set()
        assert loading.result().status_code == 200
        assert [record["name"] for record in service.records()] == ["a", "b", "c"]
        assert service.service.lifecycle.in_flight == 0


def test_an_engine_that_does_not_open_raises_where_it_was_asked_for() -> None:
    def fail() -> Engine:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        EngineThread(fail)


def test_idle_waits_for_what_was_admitted() -> None:
    async def life() -> None:
        lifecycle = Lifecycle()
        with pytest.raises(UnavailableError, match="starting"):
            lifecycle.check_admission()
        lifecycle.started = True
        with lifecycle.admit():
            lifecycle.begin_drain()
            waiting = asyncio.ensure_future(lifecycle.idle())
            await asyncio.sleep(0)
            assert not waiting.done()
            with pytest.raises(UnavailableError, match="draining"):
                lifecycle.check_admission()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(life())


def test_adapter_of_the_command_line_may_lie_anywhere(open_engine: OpenEngine, tmp_path: Path) -> None:
    with running(open_engine, None) as service:
        service.root = Path(os.fsdecode(bytes(tmp_path) + b"/not UTF-8 \xff"))
        path = Path(service.write("anywhere", 3))
        service.service.adapters.load_at_start("a", path)
        told = str(path).encode("utf-8", "backslashreplace").decode()
        assert [(r["name"], r["path"]) for r in service.records()] == [("a", told)]
        assert [m["root"] for m in service.client.get("/v1/models").json()["data"]] == ["small", told]
        assert service.forward(hidden_states=hidden_states(1), adapter="a").status_code == 200
        assert service.client.delete("/v1/adapters/a").status_code == 200
