"""Gives every request an id, echoes it in ``X-Request-Id``, and answers what nobody else caught."""

import logging
import os
import re
import time
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import response_for

log = logging.getLogger(__name__)
SANE_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
HEADER = b"x-request-id"

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the running task serves, for the log; empty outside of any."""


class RequestIdMiddleware:
    """Outermost layer of the application: a client's own id is kept if it is at most 128
    printable ASCII characters, else a new one is made."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = sent_id(scope) or os.urandom(16).hex().encode()
        current_request_id.set(request_id.decode())
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await response_for(error, scope["path"])(scope, receive, send_with_id)
        finally:
            elapsed = 1e3 * (time.perf_counter() - started)
            log.debug("%s %s %d in %.2f ms", scope["method"], scope["path"], status, elapsed)


def sent_id(scope: Scope) -> bytes | None:
    """The client's own id, or None where it sent none that we would repeat."""
    for name, value in scope["headers"]:
        if name == HEADER:
            return value if SANE_ID.fullmatch(value) else None
    return None
