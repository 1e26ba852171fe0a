"""Gives every request an id, echoes it in ``X-Request-Id``, and answers what nobody else caught."""

import logging
import re
import time
from contextvars import ContextVar
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import response_for

log = logging.getLogger(__name__)
SANE_ID = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")

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
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if SANE_ID.fullmatch(sent) else uuid4().hex
        current_request_id.set(request_id)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await response_for(error)(scope, receive, send_with_id)
        finally:
            elapsed = 1e3 * (time.perf_counter() - started)
            log.debug("%s %s %d in %.2f ms", scope["method"], scope["path"], status, elapsed)
