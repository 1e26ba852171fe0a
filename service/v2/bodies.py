"""A request's body in one buffer of its own: read as it comes, expanded, and so placed that its tensors are aligned."""

from collections.abc import Mapping

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ..compression import expanded

ALIGNMENT = 64

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


def aligned(length: int, head_bytes: int) -> memoryview:
    """Memory for a body of so many bytes, byte ``head_bytes`` of it at a multiple of 16; taken as it is written."""
    lead = -head_bytes % ALIGNMENT
    return np.empty(lead + length, np.uint8).data[lead:]


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
