"""HTTP over bare sockets for tests: what a service says to any bytes, and the answers in what it said."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from running_service import RunningService

LAST = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""A request that ends its connection, behind others whose answers are waited for."""


def connected(service: RunningService, timeout_s: float = 10) -> socket.socket:
    """A connection to ``service``, every send of which leaves at once."""
    url = service.client.base_url
    client = socket.create_connection((url.host, url.port), timeout=timeout_s)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def answered(client: socket.socket, sent: bytes) -> bytes:
    """All of the one answer to ``sent``."""
    client.sendall(sent)
    said = b""
    while b"\r\n\r\n" not in said:
        said += received(client)
    head, end, _ = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
    while len(said) < len(head + end) + length:
        said += received(client)
    return said


def received(client: socket.socket) -> bytes:
    """Some more; the connection must not have ended."""
    piece = client.recv(65536)
    assert piece, "the connection ended"
    return piece


def until_closed(client: socket.socket) -> bytes:
    """All that comes until the service ends the connection, however it does."""
    said = b""
    try:
        while piece := client.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def spoken(service: RunningService, parts: Iterator[bytes]) -> bytes:
    """All that the service says until it ends the connection, taken while ``parts`` are sent: it reads no more of a
    client that takes nothing."""

    def send(client: socket.socket) -> None:
        with suppress(OSError):  # it answered and closed already
            for part in parts:
                client.sendall(part)

    with connected(service) as client:
        sender = threading.Thread(target=send, args=(client,))
        sender.start()
        try:
            return until_closed(client)
        finally:
            sender.join()


def answers(said: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The (status, headers, body) of each answer in ``said``."""
    found = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers["content-length"])
        found.append((int(status.split()[1]), headers, said[:length]))
        said = said[length:]
    return found
