"""Bodies compressed by gzip or deflate: expanded to a limit and no further, and compressed for who asks for it."""

import asyncio
import zlib

from ..layer.errors import RequestError
from .body import too_large
from .errors import UnknownCodingError

WINDOWS = {b"gzip": 31, b"deflate": 15}
"""Compressions by name, as zlib's ``wbits``: gzip's format and zlib's, never bare deflate."""

THREAD_BYTES = 65536
"""Compressing or expanding more than this leaves the event loop."""


async def expanded(sent: bytes | memoryview, coding: bytes, max_bytes: int) -> bytes | memoryview:
    """``sent`` without its ``Content-Encoding``.

    Raises ``BodyTooLargeError`` when it expands to more than ``max_bytes``, ``RequestError`` when it does not
    expand, and ``UnknownCodingError`` for a coding other than gzip, deflate and identity.
    """
    coding = coding.lower()
    if coding in (b"identity", b""):
        return sent
    if coding not in WINDOWS:
        sentence = f"Content-Encoding should be gzip or deflate, got {coding.decode('latin-1')}"
        raise UnknownCodingError(sentence, "gzip, deflate")
    if len(sent) > THREAD_BYTES:
        return await asyncio.to_thread(expand, sent, coding, max_bytes)
    return expand(sent, coding, max_bytes)


def expand(sent: bytes | memoryview, coding: bytes, max_bytes: int) -> bytes:
    """What was compressed, if it is one whole stream of at most ``max_bytes`` and nothing else. Raises as
    ``expanded`` does."""
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


async def compressed(pieces: list[bytes | memoryview], coding: bytes) -> bytes:
    """``pieces`` end to end as one stream, fast and not very small."""
    if sum(map(len, pieces)) > THREAD_BYTES:
        return await asyncio.to_thread(compress, pieces, coding)
    return compress(pieces, coding)


def compress(pieces: list[bytes | memoryview], coding: bytes) -> bytes:
    """The same, here and now."""
    encoder = zlib.compressobj(1, zlib.DEFLATED, WINDOWS[coding])
    return b"".join([*(encoder.compress(piece) for piece in pieces), encoder.flush()])
