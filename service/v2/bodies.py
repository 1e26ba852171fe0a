"""A request's body in one buffer of its own: read as it comes, decompressed, and never longer than allowed."""

import asyncio
import zlib
from collections.abc import Mapping

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ...layer.errors import RequestError
from ..body import too_large

ALIGNMENT = 64
WINDOWS = {b"gzip": 31, b"deflate": 15}
"""Compressions by name, as zlib's ``wbits``: gzip's format and zlib's, never bare deflate."""

THREAD_BYTES = 65536
"""Compressing or expanding more than this leaves the event loop."""

Headers = Mapping[bytes, bytes]
"""The raw headers of a request, names in lower case; of those that came twice the last."""


async def read_body(headers: Headers, receive: Receive, head_bytes: int, max_bytes: int) -> memoryview:
    """The whole body, writable, with byte ``head_bytes`` of it at a multiple of 16.

    Raises ``BodyTooLargeError`` when it expands to more than ``max_bytes``, ``RequestError`` when it does
    not expand, ``HTTPException`` 415 for a ``Content-Encoding`` other than gzip and deflate, and
    ``ClientDisconnect``.
    """
    coding = headers.get(b"content-encoding", b"identity").lower()
    if coding == b"identity":
        return await _read(headers, receive, head_bytes)
    if coding not in WINDOWS:
        sentence = f"Content-Encoding should be gzip or deflate, got {coding.decode('latin-1')}"
        raise HTTPException(415, sentence, {"Accept-Encoding": "gzip, deflate"})
    sent = await _read(headers, receive, 0)
    if len(sent) > THREAD_BYTES:
        content = await asyncio.to_thread(expand, sent, coding, max_bytes)
    else:
        content = expand(sent, coding, max_bytes)
    body = _buffer(len(content), head_bytes)
    body[:] = content
    return body


def expand(sent: memoryview, coding: bytes, max_bytes: int) -> bytes:
    """What was compressed, if it is one whole stream of at most ``max_bytes`` and nothing else. Raises as
    ``read_body`` does."""
    decoder = zlib.decompressobj(WINDOWS[coding])
    name = coding.decode()
    try:
        content = decoder.decompress(sent, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not what Content-Encoding: {name} says: {error}") from None
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    if not decoder.eof:
        raise RequestError(f"the body ends before its {name} stream does")
    if decoder.unused_data:
        raise RequestError(f"the body goes on for {len(decoder.unused_data)} bytes after its {name} stream")
    return content


def compress(pieces: list[bytes | memoryview], coding: bytes) -> bytes:
    """``pieces`` end to end as one fast and weakly compressed stream."""
    encoder = zlib.compressobj(1, zlib.DEFLATED, WINDOWS[coding])
    return b"".join([*(encoder.compress(piece) for piece in pieces), encoder.flush()])


def _buffer(length: int, head_bytes: int) -> memoryview:
    lead = -head_bytes % ALIGNMENT
    return np.empty(lead + length, np.uint8).data[lead:]


async def _read(headers: Headers, receive: Receive, head_bytes: int) -> memoryview:
    declared = headers.get(b"content-length")
    if declared is None:
        return await _read_undeclared(receive)
    body = _buffer(int(declared), head_bytes)  # memory is taken as bytes arrive
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
