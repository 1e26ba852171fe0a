"""Gives every request an id, echoes it in ``X-Request-Id``, logs it, and answers what nobody else caught."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import response_for
from .sent_text import told
from .watch import ForwardWatch, current_forward

log = logging.getLogger(__name__)
access = logging.getLogger("moelet.access")
LONGEST_PATH = 200
SANE_ID = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
ID_HEADER = b"x-request-id"

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the running task serves, for the log; empty outside of any."""


@contextmanager
def naming(request_id: bytes) -> Iterator[None]:
    """Have the log name the request with this id, outside of its task."""
    token = current_request_id.set(request_id.decode())
    try:
        yield
    finally:
        current_request_id.reset(token)


class MadeIds:
    """Ids of 32 hexadecimal digits: half of them drawn once, so that no two processes make the same, and a count."""

    def __init__(self) -> None:
        self._process = os.urandom(8).hex().encode()
        self._count = int.from_bytes(os.urandom(4))

    def new(self) -> bytes:
        """One that was not made before."""
        self._count += 1
        return b"%s%016x" % (self._process, self._count)


class RequestIdMiddleware:
    """Outermost layer of the application: a client's own id is kept if it is at most 128
    printable ASCII characters, else one is ``made``.

    ``answered`` is told the status of each answer.
    """

    def __init__(self, app: ASGIApp, made: MadeIds, answered: Callable[[int], None] = lambda _status: None) -> None:
        self.app = app
        self._made = made
        self.answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = sent_id(scope["headers"]) or self._made.new()
        current_request_id.set(request_id.decode())
        current_forward.set(None)  # a request behind another on its connection starts with what that one left
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await response_for(error, scope["path"])(scope, receive, send_with_id)
        finally:
            if status:
                self.answered(status)
            if access.isEnabledFor(logging.DEBUG):
                seconds = time.perf_counter() - started
                log_access(scope["method"], scope["path"], status, seconds, current_forward.get())


def log_access(method: str, path: str, status: int, seconds: float, forward: ForwardWatch | None) -> None:
    """The line of a request that has been answered, or whose client went away (status 0)."""
    path = told(path, LONGEST_PATH)
    fields = {"method": method, "path": path, "status": status, "ms": round(1e3 * seconds, 3)}
    text = f"{method} {path} {status or 'without an answer'} in {1e3 * seconds:.2f} ms"
    if forward is not None:
        fields |= {"layer": forward.layer, "tokens": forward.num_tokens}
        text += f", layer {forward.layer}, {forward.num_tokens} tokens"
    access.debug("%s", text, extra={"fields": fields})


def sent_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The client's own id, or None where it sent none that we would repeat."""
    for name, value in headers:
        if name == ID_HEADER:
            return value if SANE_ID.fullmatch(value) else None
    return None
