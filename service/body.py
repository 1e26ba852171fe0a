"""Refuses bodies over the limit before they are read whole, however they are sent."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import BodyTooLargeError, response_for
from .limits import MIB


class BodyLimitMiddleware:
    """Answers 413 at once to a ``Content-Length`` over ``max_bytes``, and to a chunked body as
    soon as more than that has come; the connection is then closed, so that the rest is not read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = declared_length(scope)
        if declared is None:
            await self._count(scope, receive, send)
        elif declared > self.max_bytes:
            await self.refuse(scope, receive, send)
        else:  # the parser takes no byte more than was declared
            await self.app(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that did not say how long its body is."""
        received = 0
        started = exceeded = False

        async def counted_receive() -> Message:
            nonlocal received, exceeded
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                exceeded = True
                raise too_large(self.max_bytes)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            if exceeded and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        try:
            await self.app(scope, counted_receive, watched_send)
        except BodyTooLargeError:
            if started:
                raise
            await self.refuse(scope, receive, send)

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 and have the server close the connection."""
        response = response_for(too_large(self.max_bytes), scope["path"])
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def too_large(max_bytes: int) -> BodyTooLargeError:
    """What a body over ``max_bytes`` is refused with."""
    return BodyTooLargeError(
        f"the body is larger than this service takes, which is {max_bytes / MIB:g} MiB (--max-body-mb)"
    )


def declared_length(scope: Scope) -> int | None:
    """The request's ``Content-Length``, or None without one; the server let none but decimals through."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
