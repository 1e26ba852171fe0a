"""HTTP/1.1 over kept-alive loopback connections with as little client as can be: one at a time, or many at once."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

HEAD_END = b"\r\n\r\n"


def post(path: str, body: bytes, **headers: str) -> bytes:
    """A whole request, to be sent as it is."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + HEAD_END + body


class Connection:
    """One blocking connection, over which requests go one after the other."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 16)

    def call(self, request: bytes) -> bytes:
        """Send ``request``; the whole answer, head included. Raises ``RuntimeError`` unless it is 200."""
        self._socket.sendall(request)
        place = self._receive(0)
        while (end := self._buffer.find(HEAD_END, 0, place)) < 0:
            place = self._receive(place)
        head = bytes(self._buffer[:end])
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the server answered {bytes(self._buffer[:place])[:400]!r}")
        length = head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0]
        total = end + len(HEAD_END) + int(length)
        if total > len(self._buffer):
            self._buffer.extend(bytes(total - len(self._buffer)))
        while place < total:
            place = self._receive(place)
        return bytes(memoryview(self._buffer)[:total])

    def times(self, request: bytes, calls: int) -> list[float]:
        """Microseconds of each of ``calls`` calls."""
        found = []
        for _ in range(calls):
            start = time.perf_counter()
            self.call(request)
            found.append((time.perf_counter() - start) * 1e6)
        return found

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _receive(self, place: int) -> int:
        got = self._socket.recv_into(memoryview(self._buffer)[place:])
        if not got:
            raise RuntimeError("the server closed the connection")
        return place + got


class _Caller(asyncio.Protocol):
    """Sends its request again whenever an answer is whole; answers are all of one length."""

    def __init__(self, request: bytes, answer_bytes: int, ended: Callable[[], None]) -> None:
        self._request = request
        self._answer_bytes = answer_bytes
        self._ended = ended
        self._got = 0
        self.answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += len(data)
        if self._got >= self._answer_bytes:
            self._got -= self._answer_bytes
            self.answers += 1
            self.transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._ended()


async def throughput(port: int, request: bytes, clients: int, seconds: float) -> float:
    """Answers a second to so many clients, each of which asks again once it is answered."""
    loop = asyncio.get_running_loop()
    probe = Connection(port)
    answer_bytes = len(probe.call(request))
    probe.close()
    broken = asyncio.Event()
    callers = [
        (await loop.create_connection(lambda: _Caller(request, answer_bytes, broken.set), "127.0.0.1", port))[1]
        for _ in range(clients)
    ]
    before, start = sum(each.answers for each in callers), time.perf_counter()
    with suppress(TimeoutError):
        await asyncio.wait_for(broken.wait(), seconds)
        raise RuntimeError("the server closed a connection under load")
    rate = (sum(each.answers for each in callers) - before) / (time.perf_counter() - start)
    for each in callers:
        each.transport.close()
    return rate
