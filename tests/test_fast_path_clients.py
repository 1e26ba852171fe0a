"""Inferences answered straight from their connection, by clients that are slow, leave, or do nothing any more."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from eventually import eventually
from fast_requests import Pair, asking, counted, paired
from moelet.service.limits import Limits
from raw_http import answered, connected, until_closed
from running_service import OpenEngine, RunningService

TIMEOUT_S, KEEP_ALIVE_S = 0.8, 1


@pytest.fixture(scope="module")
def hasty(open_engine: OpenEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two that wait for nothing long."""

    root = tmp_path_factory.mktemp("adapters")
    with paired(open_engine, root, body_timeout_s=TIMEOUT_S, keep_alive_s=KEEP_ALIVE_S) as pair:
        yield pair


@pytest.fixture
def quiet(open_engine: OpenEngine, tmp_path: Any) -> Iterator[Pair]:
    """Two that nobody else speaks to."""

    with paired(open_engine, tmp_path, bounds=Limits(max_queue=3)) as pair:
        yield pair


def test_a_connection_ends_when_it_has_rested_for_long_enough_and_not_before(hasty: Pair) -> None:
    """After each of several answers on the way past the application, and with one through it between them."""
    with connected(hasty.fast) as client:
        for sent in (asking(1), asking(2), b"GET /ready HTTP/1.1\r\n\r\n", asking(3), asking(1)):
            assert answered(client, sent).startswith(b"HTTP/1.1 200 OK\r\n")
            rested = time.monotonic()
            time.sleep(0.45 * KEEP_ALIVE_S)
        assert until_closed(client) == b""
        assert 0.95 * KEEP_ALIVE_S < time.monotonic() - rested < 1.6 * KEEP_ALIVE_S
    with connected(hasty.slow) as client:
        client.sendall(asking(1) + asking(2) + b"GET /ready HTTP/1.1\r\n\r\n" + asking(3) + asking(1))
        until_closed(client)


@pytest.mark.parametrize("drips", [False, True])
def test_a_body_that_does_not_come_ends_its_connection(hasty: Pair, drips: bool) -> None:
    def act(service: RunningService) -> bytes:
        with connected(service) as client:
            time.sleep(0.6 * TIMEOUT_S)  # which is not the request's
            started = time.monotonic()
            client.sendall(asking(9)[:400])
            while drips and time.monotonic() - started < TIMEOUT_S * 0.9:
                client.sendall(b"x")
                time.sleep(0.05)
            said = until_closed(client)
            assert 0.95 * TIMEOUT_S < time.monotonic() - started < 2 * TIMEOUT_S
            return said

    slow, cancelled = ("moelet_connections_ended_total", "slow_request"), ("moelet_requests_total", "1", "cancelled")
    before = counted(hasty.fast)
    assert hasty.of_both(act) == []
    assert hasty.begun == []
    after = counted(hasty.fast)
    assert [after[kind] - before.get(kind, 0) for kind in (slow, cancelled)] == [1, 1]


@pytest.mark.parametrize("behind", [b"", b"GET /re", asking(1), asking(3)[:-5]])
@pytest.mark.parametrize("waits", [True, False])
def test_what_a_client_that_left_waited_for_is_not_computed(quiet: Pair, behind: bytes, waits: bool) -> None:
    """``waits``: in the queue, else in the engine, where it is computed and goes nowhere."""
    named = asking(2, parameters={"adapter": "a", "binary_data_output": True})

    def act(service: RunningService) -> bytes:
        with service.engine.closed(), ExitStack() as others:
            for _ in range(service.service.engine.depth if waits else 0):
                others.enter_context(connected(service)).sendall(asking(1))
                assert service.engine.waiting.wait(10)
            with connected(service) as client:
                client.sendall(named + behind)
                eventually(lambda: service.service.adapters.in_flight_by_name()["a"] == 1)
                if not waits:
                    assert service.engine.waiting.wait(10)
            eventually(lambda: service.service.adapters.in_flight_by_name()["a"] == 0)
            cancelled = ("moelet_requests_total", "1", "cancelled")
            eventually(lambda: counted(service).get(cancelled) == 1)
            eventually(
                lambda: service.service.metrics.requests_in_flight == (service.service.engine.depth if waits else 0)
            )
        eventually(lambda: service.service.lifecycle.in_flight == 0)
        return b""

    of_forwards = []
    for service in (quiet.fast, quiet.slow):
        act(service)
        of_forwards.append(service.engine.forwards)
    assert of_forwards == [quiet.fast.service.engine.depth if waits else 1] * 2


def test_a_client_that_leaves_while_its_body_comes_is_counted(quiet: Pair) -> None:
    def act(service: RunningService) -> bytes:
        for cut in (200, 300, 330):
            with connected(service) as client:
                client.sendall(asking(1) + asking(1)[:cut])
                assert client.recv(65536).startswith(b"HTTP/1.1 200")
                time.sleep(0.05)
        return b""

    quiet.of_both(act)
    assert counted(quiet.fast)["moelet_requests_total", "1", "cancelled"] >= 1


def test_a_client_that_takes_nothing_of_its_answers_is_ended(hasty: Pair) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect((hasty.fast.client.base_url.host, hasty.fast.client.base_url.port))
        with pytest.raises(ConnectionError):  # noqa: PT012 - whichever of the many sends it is
            for _ in range(1000):
                client.sendall(asking(5000))
    assert counted(hasty.fast)["moelet_connections_ended_total", "slow_reader"] == 1
