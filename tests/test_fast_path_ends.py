"""Inferences answered straight from their connection, and all that ends them otherwise than with an output."""

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from eventually import eventually
from fast_requests import BINARY, Pair, asking, counted, infer, paired, unmade
from moelet.layer.engine import Forward, LayerBatch
from moelet.layer.errors import EngineError, EngineFailedError
from moelet.service.fast_path import FastPathProtocol
from moelet.service.limits import Limits
from moelet.service.request_id import current_request_id
from raw_http import LAST, answered, answers, connected, until_closed
from running_service import OpenEngine, RunningService, hidden_states, running
from v2_wire import request

POISON = 250.0


class Poisoned:
    """An engine that fails every batch with a token that begins with ``POISON``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def begin(self, batch: LayerBatch) -> Forward:
        if bool((batch.hidden_states[:, 0] == POISON).any()):
            raise EngineError("a poisoned token")
        forward: Forward = self.engine.begin(batch)
        return forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture
def quiet(open_engine: OpenEngine, tmp_path: Any) -> Iterator[Pair]:
    """Two that nobody else speaks to."""

    def opened(*arguments: Any) -> Any:
        return Poisoned(open_engine(*arguments))

    with paired(opened, tmp_path, bounds=Limits(max_queue=3)) as pair:
        yield pair


@pytest.mark.parametrize(("body", "status"), [("waits", 200), ("comes", 200), ("is wrong", 400), ("is refused", 503)])
def test_a_service_that_ends_answers_what_it_has(open_engine: OpenEngine, body: str, status: int) -> None:
    """With ``connection: close``, and waits for nothing else."""
    sent = infer(b"{" * 300, None) if body == "is wrong" else asking(1)
    cut = len(sent) if body == "waits" else len(sent) - 9
    serving = running(open_engine, None)
    service = serving.__enter__()
    with ThreadPoolExecutor() as pool, connected(service) as client, service.engine.closed():
        client.sendall(sent[:cut])
        assert body != "waits" or service.engine.waiting.wait(10)
        time.sleep(0.1)
        if body == "is refused":
            service.service.lifecycle.begin_drain()
        ended = pool.submit(serving.__exit__, None, None, None)
        time.sleep(0.4)
        service.engine.gate.set()
        client.sendall(sent[cut:])
        [(told, headers, _)] = answers(until_closed(client))
        assert (told, headers["connection"]) == (status, "close")
        ended.result(4)


@pytest.mark.parametrize("arriving", [False, True])
def test_no_forward_is_begun_where_none_is_taken(quiet: Pair, arriving: bool) -> None:
    """Which is told before the body is there, as soon as the head is."""
    sent = asking(1)

    def act(service: RunningService) -> bytes:
        with service.engine.closed(), ExitStack() as others:
            for _ in range(service.service.engine.depth + 3):
                others.enter_context(connected(service)).sendall(sent)
                assert service.engine.waiting.wait(10)
            eventually(lambda: service.service.metrics._queue.requests() == 3)
            with connected(service) as client:
                said = answered(client, sent[: sent.index(b"\r\n\r\n") + 10] if arriving else sent)
        eventually(lambda: service.service.lifecycle.in_flight == 0)
        return said

    said = []
    for service in (quiet.fast, quiet.slow):
        said.append(unmade(act(service)))
    assert said[0] == said[1]
    [(status, headers, told)] = answers(said[0])
    assert (status, headers["retry-after"]) == (503, "1")
    assert "may hold 3 requests" in json.loads(told)["error"]


@pytest.mark.parametrize("late", ["waiting", "arriving", "by a parameter"])
def test_what_is_not_answered_in_its_time_is_told_so(quiet: Pair, late: str) -> None:
    fields: dict[str, Any] = {"timeout": 200_000} if late == "by a parameter" else {}
    sent = asking(1, b"X-Request-Timeout-Ms: 200", parameters={"binary_data_output": True, **fields})
    cut = len(sent) - 5

    def act(service: RunningService) -> bytes:
        with service.engine.closed(), connected(service) as client:
            client.sendall(sent[:cut])
            if late == "arriving":
                time.sleep(0.3)
                service.engine.gate.set()
            client.sendall(sent[cut:] + LAST)
            return until_closed(client)

    (status, headers, told), (last, *_) = quiet.of_both(act)
    assert (status, last) == (504, 200)
    assert json.loads(told) == {"error": "the request was not answered within its 200 ms"}
    assert headers["x-request-id"]
    assert quiet.begun == [True]
    assert counted(quiet.fast)["moelet_requests_total", "1", "expired"] == 1


def test_an_error_of_the_engine_is_told_and_logged(quiet: Pair, caplog: pytest.LogCaptureFixture) -> None:
    logged: list[tuple[str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.getMessage(), current_request_id.get()))

    def act(service: RunningService) -> bytes:
        with service.engine.failing(RuntimeError("out of luck")), connected(service) as client:
            client.sendall(asking(1, b"X-Request-Id: mine") + LAST)
            return until_closed(client)

    noting = Noting(logging.ERROR)
    logging.getLogger("moelet").addHandler(noting)
    try:
        (status, headers, told), (last, *_) = quiet.of_both(act)
    finally:
        logging.getLogger("moelet").removeHandler(noting)
    assert (status, headers["x-request-id"], last) == (500, "mine", 200)
    assert "its log has the details" in json.loads(told)["error"]
    assert logged == [("POST /v2/models/layers.1/infer failed", "mine")] * 2
    assert counted(quiet.fast)["moelet_requests_total", "1", "failed"] == 1
    assert caplog.records


def test_an_engine_that_failed_for_good_is_told_to_all(quiet: Pair) -> None:
    """To those that wait with its first failure, and to those that come later."""

    def act(service: RunningService) -> bytes:
        with service.engine.closed(), ExitStack() as open_:
            clients = [open_.enter_context(connected(service)) for _ in range(3)]
            for client in clients:
                client.sendall(asking(1))
                assert service.engine.waiting.wait(10)
            eventually(lambda: service.service.lifecycle.in_flight == 3)
            service.engine.error = EngineFailedError("the device fell off the bus")
            service.engine.gate.set()
            for client in clients:
                client.sendall(asking(1) + LAST)
            return b"".join(map(until_closed, clients))

    said = quiet.of_both(act)
    assert [status for status, *_ in said] == [503] * 9
    assert all("fell off the bus" in json.loads(told)["error"] for status, _, told in said[:2])


def test_one_that_fails_in_a_batch_is_the_only_one(quiet: Pair) -> None:
    poison = torch.full((1, hidden_states(1).shape[1]), POISON)
    poisoned = infer(*request({"hidden_states": poison}, **BINARY))

    def act(service: RunningService) -> bytes:
        depth = service.service.engine.depth
        with ExitStack() as open_:
            with service.engine.closed():
                for _ in range(depth):
                    open_.enter_context(connected(service)).sendall(asking(1))
                    assert service.engine.waiting.wait(10)
                clients = [open_.enter_context(connected(service)) for _ in range(3)]
                for client, sent in zip(clients, (asking(1), poisoned, asking(2)), strict=True):
                    client.sendall(sent + LAST)
                eventually(lambda: service.service.lifecycle.in_flight == depth + 3)
            said = b"".join(map(until_closed, clients))
            eventually(lambda: service.service.lifecycle.in_flight == 0)
            return said

    assert [status for status, *_ in quiet.of_both(act)] == [200, 200, 500, 200, 200, 200]


def test_an_answer_that_cannot_be_written_costs_no_other(
    quiet: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, write = quiet.fast, FastPathProtocol._answer

    def broken(self: FastPathProtocol, status: int, headers: bytes, body: Any) -> None:
        if b"x-request-id: broken" in headers:
            raise RuntimeError("no way to write")
        write(self, status, headers, body)

    monkeypatch.setattr(FastPathProtocol, "_answer", broken)
    with ExitStack() as open_:
        with service.engine.closed():
            for _ in range(service.service.engine.depth):
                open_.enter_context(connected(service)).sendall(asking(1))
                assert service.engine.waiting.wait(10)
            clients = [open_.enter_context(connected(service)) for _ in range(3)]
            for client, name in zip(clients, (b"a", b"broken", b"c"), strict=True):
                client.sendall(asking(1, b"X-Request-Id: " + name))
            eventually(lambda: service.service.lifecycle.in_flight == service.service.engine.depth + 3)
        for client in clients[::2]:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert service.service.lifecycle.in_flight == 0
    assert "no way to write" in caplog.text
