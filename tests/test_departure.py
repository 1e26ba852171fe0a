"""Clients that go away before they are answered: noticed while they wait, and their work dropped."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from eventually import eventually
from moelet.service.departure import Departures
from moelet.service.limits import Limits
from running_service import HIDDEN, OpenEngine, RunningService, hidden_states, running


def connect(service: RunningService) -> socket.socket:
    """A connection that has asked for one forward of one token."""
    body = b'{"hidden_states": [[' + b",".join([b"0"] * HIDDEN) + b"]]}"
    head = f"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = service.client.base_url
    client = socket.create_connection((url.host, url.port))
    client.sendall(head + body)
    return client


def test_what_clients_that_left_waited_for_is_not_computed(running_service: RunningService) -> None:
    service = running_service
    depth = service.service.engine.depth
    before = service.engine.forwards
    cancelled = service.metric("moelet_requests_total", layer="1", outcome="cancelled")
    with service.engine.closed(), ExitStack() as open_clients:
        for _ in range(depth):
            open_clients.enter_context(connect(service))
            assert service.engine.waiting.wait(10)
        leaving = [connect(service) for _ in range(20)]
        eventually(lambda: service.metric("moelet_queue_requests") == 20)
        stays = open_clients.enter_context(connect(service))
        for client in leaving:
            client.close()
        eventually(lambda: service.metric("moelet_queue_requests") == 1)
        assert service.metric("moelet_requests_in_flight") == depth + 1
        service.engine.gate.set()
        assert stays.recv(15) == b"HTTP/1.1 200 OK"
    assert service.engine.forwards == before + depth + 1
    assert service.metric("moelet_requests_total", layer="1", outcome="cancelled") == cancelled + 20


def test_a_full_queue_is_told_before_the_body_is_read(open_engine: OpenEngine) -> None:
    with running(open_engine, None, bounds=Limits(max_queue=2)) as service, service.engine.closed():
        clients = [connect(service) for _ in range(service.service.engine.depth + 2)]
        eventually(lambda: service.metric("moelet_queue_requests") == 2)
        refused = service.forward(hidden_states="no body is parsed when nothing is taken")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "may hold 2 requests" in refused.json()["error"]["message"]
        assert service.metric("moelet_requests_total", layer="1", outcome="rejected") == 1
        service.engine.gate.set()
        assert [client.recv(15) for client in clients] == [b"HTTP/1.1 200 OK"] * len(clients)
        assert service.forward(hidden_states=hidden_states(1)).status_code == 200
        for client in clients:
            client.close()


class Client:
    """An ASGI ``receive`` whose client goes away when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        await self.gone.wait()
        return {"type": "http.disconnect"}


def run(check: Callable[[Departures, Client], Awaitable[None]]) -> None:
    """``check``, which must leave no task behind."""

    async def checked() -> None:
        await asyncio.wait_for(check(Departures(), Client()), 20)
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(checked())


def test_who_is_answered_at_once_is_not_watched() -> None:
    async def check(departures: Departures, client: Client) -> None:
        assert await departures.unless_gone(asyncio.sleep(0, "answer"), client.receive) == "answer"
        assert client.asked == 0

    run(check)


def test_who_waits_is_watched_and_answered_all_the_same() -> None:
    async def check(departures: Departures, client: Client) -> None:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(departures.unless_gone(answer, client.receive))
        while not client.asked:
            await asyncio.sleep(0.005)
        answer.set_result("answer")
        assert await waiting == "answer"

    run(check)


@pytest.mark.parametrize("answered", [False, True])
def test_who_leaves_gets_a_disconnect_even_with_the_answer_at_hand(answered: bool) -> None:
    async def check(departures: Departures, client: Client) -> None:
        answer = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(departures.unless_gone(answer, client.receive))
        while not client.asked:
            await asyncio.sleep(0.005)
        client.gone.set()
        if answered:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not answer.done():
                answer.set_result("answer")
        with pytest.raises(ClientDisconnect):
            await waiting
        assert answer.done()
        assert not waiting.cancelled()

    run(check)


def test_errors_and_cancellation_pass_through() -> None:
    async def check(departures: Departures, client: Client) -> None:
        failing = asyncio.get_running_loop().create_future()
        failing.set_exception(ValueError("mine"))
        with pytest.raises(ValueError, match="mine"):
            await departures.unless_gone(failing, client.receive)
        waiting = asyncio.ensure_future(departures.unless_gone(asyncio.sleep(60), client.receive))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(check)
