"""Refuses bodies over the limit before they are read whole, however they are sent."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import BodyTooLargeError, response_for

MIB = 1 << 20


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
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            await self.refuse(scope, receive, send)
            return
        received = 0
        started = exceeded = False

        async def counted_receive() -> Message:
            nonlocal received, exceeded
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                exceeded = True
                raise BodyTooLargeError(self.sentence)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            if exceeded and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            await self.app(scope, counted_receive, watched_send)
        except BodyTooLargeError:
            if started:
                raise
            await self.refuse(scope, receive, send)

    @property
    def sentence(self) -> str:
        """What the client is told."""
        return f"the body is larger than this service takes, which is {self.max_bytes / MIB:g} MiB (--max-body-mb)"

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 and have the server close the connection."""
        response = response_for(BodyTooLargeError(self.sentence))
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
