"""A request and its reply as the handlers under ``/v2`` see them: raw headers in, whole bodies out."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Send

from .bodies import Headers

JSON = (b"content-type", b"application/json")
OCTETS = (b"content-type", b"application/octet-stream")
Header = tuple[bytes, bytes]

SMALL = 65536
"""Bodies up to this many bytes are joined: cheaper than a second message."""


class Incoming(NamedTuple):
    """A request whose path has matched: ``names`` are the variable parts of it, in order."""

    names: tuple[str, ...]
    headers: Headers
    receive: Receive


class Reply(NamedTuple):
    """An answer with 200, its body in pieces that go out one after the other, never chunked."""

    pieces: list[bytes | memoryview]
    headers: tuple[Header, ...] = (JSON,)


Handler = Callable[[Incoming], Awaitable[Reply]]


def json_reply(value: Any) -> Reply:
    """``value`` as JSON."""
    return Reply([orjson.dumps(value)])


async def send_reply(reply: Reply, send: Send) -> None:
    """Send it, with its length."""
    pieces = reply.pieces
    length = sum(map(len, pieces))
    if len(pieces) > 1 and length <= SMALL:
        pieces = [b"".join(pieces)]
    headers = [*reply.headers, (b"content-length", b"%d" % length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": pieces[-1]})
