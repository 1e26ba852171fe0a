"""The timers of a connection, over a transport that goes nowhere: how few there are, and what each one ends."""

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from moelet.service.fast_path import FastPathProtocol
from moelet.service.http_config import http_config
from moelet.service.known_requests import Body
from moelet.service.protocol import Protocol


class FakeTransport(asyncio.Transport):
    """Takes what is written, and nothing comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self.unsent = 0

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def resume_reading(self) -> None:
        pass


class Known:
    """Knows one head, with a body of two bytes, and answers on the loop's next turn."""

    HEAD = b"POST /known HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
    body_bytes = 2

    def find(self, head: bytes) -> "Known | None":
        return self if head == self.HEAD else None

    def new_body(self) -> Body:
        return Body(memoryview(bytearray(2)))

    def begin(self, body: Body, came: float, write: Any) -> "Known":  # noqa: ARG002
        asyncio.get_running_loop().call_soon(write, 200, b"content-length: 2\r\n\r\n", [body.octets])
        return self

    def drop(self) -> None:
        pass


async def quiet(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
    """Takes a body and answers nothing."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def timers_set(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays of all timers that are set on the running loop from here on."""
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    later = loop.call_later

    def noted(delay: float, *work: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return later(delay, *work, **options)

    monkeypatch.setattr(loop, "call_later", noted)
    return timers


def test_no_packet_has_a_timer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer for a connection, one for a request in pieces, one for the pause behind an answer, and no other."""

    async def serve() -> list[float]:
        timers = timers_set(monkeypatch)
        config = http_config(quiet, body_timeout_s=20, keep_alive_s=5)
        state = ServerState()
        connection = Protocol(config=config, server_state=state, app_state={})
        connection.connection_made(FakeTransport())
        for _ in range(3):
            connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.gather(*state.tasks)
        assert timers == [20, 5, 5, 5]
        timers.clear()
        for piece in (b"POST / HTTP/1.1\r\n", *[b"A: b\r\n"] * 50, b"Content-Length: 50\r\n\r\n", *[b"x"] * 50):
            connection.data_received(piece)
        await asyncio.gather(*state.tasks)
        connection.connection_lost(None)
        return timers

    assert asyncio.run(serve()) == [20, 5]


def test_requests_that_are_known_share_the_timer_of_the_pause_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> list[float]:
        timers = timers_set(monkeypatch)
        config = http_config(quiet, known=Known(), body_timeout_s=20, keep_alive_s=5)
        state = ServerState()
        connection = FastPathProtocol(config=config, server_state=state, app_state={})
        connection.connection_made(FakeTransport())
        for _ in range(50):
            connection.data_received(Known.HEAD + b"{}")
            await asyncio.sleep(0)
        assert (timers, state.total_requests) == ([20, 5], 50)
        for piece in (Known.HEAD, b"{", b"}"):
            connection.data_received(piece)
        await asyncio.sleep(0)
        assert (timers, state.total_requests) == ([20, 5, 20], 51)
        connection.data_received((Known.HEAD + b"{}") * 3)
        for _ in range(3):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        assert (timers, state.total_requests, state.tasks) == ([20, 5, 20], 54, set())
        return timers

    assert asyncio.run(serve())


def test_a_slow_reader_is_ended_only_when_it_takes_nothing() -> None:
    async def serve() -> list[bool]:
        config = http_config(quiet)
        connection = Protocol(config=config, server_state=ServerState(), app_state={})
        transport = FakeTransport()
        connection.connection_made(transport)
        transport.unsent = 1000
        connection.pause_writing()
        ended = []
        for transport.unsent in (900, 100, 100):
            connection._end_unless_read()
            ended.append(transport.closing)
        connection.connection_lost(None)
        return ended

    assert asyncio.run(serve()) == [False, False, True]
