"""Requests leave nothing behind that only a search for garbage would find, and the search is seldom."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from eventually import eventually
from fast_requests import BINARY, asking, infer
from moelet.layer.errors import EngineError
from moelet.service.departure import WATCH_AFTER_S
from moelet.service.engine_thread import EngineThread
from moelet.service.garbage import NEW_OBJECTS, search_seldom
from plain_engine import PlainEngine
from raw_http import answered, connected
from running_service import RunningService, hidden_states, random_adapter
from v2_wire import request

APPLICATION = b"Accept-Encoding: gzip"
LATE = b"X-Request-Timeout-Ms: 0.001"

JSON = b'{"hidden_states": [[' + b",".join([b"0.5"] * 48) + b"]]}"
LOAD = b'PUT /v1/adapters/c HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{"path": "%b"}'
REQUESTS = {
    "past the application": (200, asking(3)),
    "through the application": (200, asking(3, APPLICATION)),
    "JSON": (200, b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(JSON), JSON)),
    "refused shape": (400, infer(*request({"hidden_states": hidden_states(3)[:, :40]}, **BINARY))),
    "refused body": (400, asking(3, b"Content-Encoding: gzip")),
    "refused layer": (404, asking(3).replace(b"layers.1", b"layers.9")),
    "refused adapter": (404, asking(3, parameters={**BINARY["parameters"], "adapter": "none"})),
    "late past the application": (504, asking(3, LATE)),
    "late through the application": (504, asking(3, LATE, APPLICATION)),
    "refused load": (400, LOAD % (16, b"dora")),
    "load of nothing": (404, LOAD % (18, b"absent")),
}


@pytest.fixture
def found() -> Iterator[list[object]]:
    """What a search finds that is begun in the test; none is begun else."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("kind", REQUESTS)
def test_requests_leave_no_garbage(running_service: RunningService, found: list[object], kind: str) -> None:
    status, sent = REQUESTS[kind]
    with connected(running_service) as client:
        for _ in range(30):
            assert answered(client, sent).startswith(b"HTTP/1.1 %d " % status)
        check_little(running_service, found, 30)


@pytest.mark.parametrize("lines", [(), (APPLICATION,)])
def test_a_failing_engine_leaves_no_garbage(
    running_service: RunningService, found: list[object], lines: tuple[bytes, ...]
) -> None:
    with running_service.engine.failing(EngineError("a failure")):
        for _ in range(10):
            with ExitStack() as open_:
                clients = [open_.enter_context(connected(running_service)) for _ in range(3)]
                with running_service.engine.closed():
                    for client in clients:
                        client.sendall(asking(3, *lines))
                    eventually(lambda: running_service.service.lifecycle.in_flight == 3)
                for client in clients:
                    assert answered(client, b"").startswith(b"HTTP/1.1 500 ")
    check_little(running_service, found, 10)


def test_clients_that_are_watched_leave_no_garbage(running_service: RunningService, found: list[object]) -> None:
    with ExitStack() as open_:
        clients = [open_.enter_context(connected(running_service)) for _ in range(10)]
        with running_service.engine.closed():
            for client in clients:
                client.sendall(asking(3, APPLICATION))
            time.sleep(4 * WATCH_AFTER_S)
        for client in clients:
            assert answered(client, b"").startswith(b"HTTP/1.1 200 ")
    check_little(running_service, found, 10)


def test_a_failed_install_leaves_no_garbage(found: list[object]) -> None:
    engine, adapter, ended = PlainEngine(), random_adapter(1), threading.Semaphore(0)
    engine.refuses = {adapter.lora_alpha}
    thread = EngineThread(lambda: engine)
    for _ in range(10):
        thread.install(0, adapter, lambda error, _seconds: ended.release() if error else None)
        assert ended.acquire(timeout=10)
    thread.close()
    gc.collect()
    assert len(found) < 10


def check_little(service: RunningService, found: list[object], most: int) -> None:
    """A search finds fewer than ``most`` once nothing is in flight."""
    eventually(lambda: service.service.lifecycle.in_flight == 0)
    gc.collect()
    assert len(found) < most


def test_what_is_there_is_left_out_and_a_search_is_seldom() -> None:
    before = gc.get_threshold()
    try:
        search_seldom()
        assert gc.get_freeze_count() > NEW_OBJECTS
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
