"""A request's body in one buffer of its own: read as it comes, expanded, and so placed that its tensors are aligned."""

from collections.abc import Mapping

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ...layer.engine import Lend
from ..compression import expanded
from ..known_requests import Body

ALIGNMENT = 64
LARGEST_KEPT = 32768
LONGEST_READ = 512
"""Bodies of up to so many bytes are used again, where up to so many of those are JSON."""
READING_BYTES = 4096
KEPT_BYTES = 1 << 18
"""What was read of one takes about so many bytes beside it, and so many of both are kept for requests of one head."""

Headers = Mapping[bytes, bytes]
"""The raw headers of a request, names in lower case; of those that came twice the last."""


async def read_body(headers: Headers, receive: Receive, head_bytes: int, max_bytes: int) -> memoryview:
    """The whole body, writable, with byte ``head_bytes`` of it at a multiple of 16.

    Raises as ``expanded`` does, and ``ClientDisconnect``.
    """
    coding = headers.get(b"content-encoding")
    if coding is None:
        return await _read(headers, receive, head_bytes)
    content = await expanded(await _read(headers, receive, 0), coding, max_bytes)
    body = aligned(len(content), head_bytes)
    body[:] = content
    return body


def aligned(length: int, head_bytes: int, lend: Lend | None = None) -> memoryview:
    """Memory for a body of so many bytes, byte ``head_bytes`` of it at a multiple of 16: what ``lend`` gives, if it
    does, else such as is taken as it is written."""
    lead = -head_bytes % ALIGNMENT
    lent = lend(lead + length) if lend else None
    return (np.empty(lead + length, np.uint8).data if lent is None else lent)[lead:]


class Bodies:
    """Memory for bodies of ``length`` bytes, ``head_bytes`` of them before their tensors: that of answered requests
    first, with what was read of them. Large ones have what ``lend`` gives for so many bytes, if it does.

    ``keeps``  whether any is used again; else nothing that was read need stay with one
    """

    def __init__(self, length: int, head_bytes: int, lend: Lend | None = None) -> None:
        self._length = length
        self._head_bytes = head_bytes
        self._lend = lend
        self.keeps = length <= LARGEST_KEPT and head_bytes <= LONGEST_READ
        self._most = KEPT_BYTES // (length + READING_BYTES) if self.keeps else 0
        self._spare: list[Body] = []

    def take(self) -> Body:
        """One that nothing else uses."""
        if self._spare:
            return self._spare.pop()
        return Body(aligned(self._length, self._head_bytes, self._lend if self._length > LARGEST_KEPT else None))

    def give_back(self, body: Body) -> None:
        """Nothing will look at ``body`` any more."""
        if body.read is not None and len(self._spare) < self._most:
            self._spare.append(body)


async def _read(headers: Headers, receive: Receive, head_bytes: int) -> memoryview:
    declared = headers.get(b"content-length")
    if declared is None:
        return await _read_undeclared(receive)
    body = aligned(int(declared), head_bytes)  # memory is taken as bytes arrive
    place = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        if part := message.get("body"):
            end = place + len(part)
            body[place:end] = part
            place = end
        if not message.get("more_body", False):
            return body[:place]


async def _read_undeclared(receive: Receive) -> memoryview:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return memoryview(body)
