"""HTTP/1.1 below the application: what is no HTTP gets the one error shape too, and heads and waits have an end."""

import asyncio
import logging
from uuid import uuid4

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .connection_limits import ProtocolConfig
from .errors import error_body

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65536
"""Of a request line and headers that have not ended, and of what else is no body."""

TOO_LONG = f"the request's head is longer than this service takes, {MAX_HEAD_BYTES} bytes"

MAX_HEADERS = 128

BODY_HEADERS = (b"content-length", b"transfer-encoding")

OWS = b" \t"
"""What may stand around a header's value and is no part of it (RFC 9110, 5.6.3). Parsers differ in what they leave."""


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, whose own refusals are JSON and carry an ``X-Request-Id``.

    A request that is not there whole in time ends its connection: one timer runs from a request's first
    bytes to its last, and none for a request that comes in one piece. So does a client that takes
    nothing of its answer for as long.

    It offers no upgrade, and serves a request that asks for one (as HTTP clients that would rather
    speak HTTP/2 do) as if it did not: with its body, which the parser takes for the other protocol's.
    """

    config: ProtocolConfig
    url = b""
    _in_head = False
    _whole = False
    _head_bytes = 0
    _unsent = 0
    _repeats_head = False
    _fault: tuple[int, str] | None = None
    _answering: RequestResponseCycle | None = None
    _arriving: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client; its first request has to come in time."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.config.max_connections:
            self.refuse(503, f"this service has {self.config.max_connections} connections open and takes no more")
        else:
            self._await_request(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and nothing waits for it."""
        super().connection_lost(exc)
        self._drop_answers()
        self._unset_keepalive_if_required()
        self._await_request(False)
        self._await_reader(False)

    def data_received(self, data: bytes) -> None:
        """Parse what came; 431 once what brings neither the head's end nor a body is over ``MAX_HEAD_BYTES``."""
        self._head_bytes += len(data)
        self._feed(data)
        if self._head_bytes > MAX_HEAD_BYTES and not (self._whole or self.transport.is_closing()):
            self.refuse(431, TOO_LONG)
        self._await_request(not (self._whole or self.transport.is_closing()))

    def on_message_begin(self) -> None:
        """A request begins with its head."""
        if not self._repeats_head:
            self._unset_keepalive_if_required()
            self._await_request(False)
            self._in_head, self._whole = True, False
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the target; what parses it once it is whole takes no longer one."""
        if not self._repeats_head:
            super().on_url(url)
            if len(self.url) > MAX_HEAD_BYTES - 1:
                self._fault = (431, TOO_LONG)
                raise ValueError("too long a target")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one that comes behind the body is dropped, as what it says was decided by then."""
        if self._in_head and not self._repeats_head:
            super().on_header(name, value.strip(OWS))

    def on_headers_complete(self) -> None:
        """The head has ended."""
        if self._repeats_head:
            return
        long = self._head_bytes > MAX_HEAD_BYTES and self._is_long()  # what came may be a short head and its body
        self._in_head, self._head_bytes = False, 0
        if long:
            self._fault = (431, TOO_LONG)
            raise ValueError("too long a head")
        if len(self.headers) > MAX_HEADERS:
            self._fault = (431, f"the request has {len(self.headers)} headers, and this service takes {MAX_HEADERS}")
            raise ValueError("too many headers")
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def _is_long(self) -> bool:
        """Whether the target and headers, as they were parsed, are more than a head may have."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body has ended, unless the parser left it out."""
        if not (self.parser.should_upgrade() and self._body_headers()):
            self._whole, self._head_bytes = True, 0
            super().on_message_complete()
            if self.cycle.response_complete:  # by an answer that did not wait for the body
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def on_response_complete(self) -> None:
        """The answer is written, which is not to say that the client takes it."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._answering = following
        if self.transport.is_closing():
            self._await_reader(True)
        elif not self._whole:  # a request is arriving, and has a timer of its own
            self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        """The client sends nothing more."""
        super().timeout_keep_alive_handler()
        self._await_reader(True)

    def pause_writing(self) -> None:
        """More is written than the client takes."""
        super().pause_writing()
        self._await_reader(True)

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        super().resume_writing()
        self._await_reader(self.transport.is_closing())

    def _await_request(self, arriving: bool) -> None:
        """Have one timer while a request, the first one included, is not there whole."""
        if not arriving:
            if self._arriving is not None:
                self._arriving.cancel()
                self._arriving = None
        elif self._arriving is None:
            self._arriving = self.loop.call_later(self.config.body_timeout_s, self._end_unless_busy)

    def _end_unless_busy(self) -> None:
        """End the connection, unless it is us who do not read while an earlier request is answered."""
        self._arriving = None
        if self.flow.read_paused or self._owes_an_answer():
            self._await_request(True)
            return
        log.info("ended a connection: no whole request came within %g s", self.config.body_timeout_s)
        self.config.ended("slow_request")
        self._drop_answers()
        self.transport.abort()

    def _owes_an_answer(self) -> bool:
        """Whether an earlier request than the one that arrives, if any, waits for its answer."""
        if self.pipeline:
            return True
        return (self._in_head or self._whole) and self.cycle is not None and not self.cycle.response_complete

    def _drop_answers(self) -> None:
        """Have what the connection's requests still say go nowhere, and tell them that their client is gone.

        uvicorn tells the last of several alone, and only once the connection is closed.
        """
        for cycle in (self._answering, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _await_reader(self, unsent: bool) -> None:
        """Have a timer while there is something that the client does not take."""
        if not unsent:
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
        elif self._leaving is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._leaving = self.loop.call_later(self.config.body_timeout_s, self._end_unless_read)

    def _end_unless_read(self) -> None:
        """End the connection, unless the client has taken something since."""
        self._leaving = None
        if (unsent := self.transport.get_write_buffer_size()) < self._unsent:
            self._await_reader(unsent > 0)
            return
        log.info("ended a connection: the client took nothing of its answer for %g s", self.config.body_timeout_s)
        self.config.ended("slow_reader")
        self._drop_answers()
        self.transport.abort()

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.refuse(*(self._fault or (400, "the request is not valid HTTP/1.1")))

    def _parse(self, data: bytes) -> bytes:
        """Parse ``data``; what is left of it where a head asked for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def _ignore_upgrade(self) -> None:
        """Go on after a head that asked for an upgrade: with its body in a fresh parser, told of the body alone."""
        self.parser = httptools.HttpRequestParser(self)
        if body_headers := self._body_headers():
            self._repeats_head = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + body_headers + b"\r\n")
            self._repeats_head = False

    def _body_headers(self) -> bytes:
        return b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name in BODY_HEADERS)

    def refuse(self, status: int, message: str) -> None:
        """Answer with ``status`` and end the connection.

        Where another answer is due first, end it without a word: the client would take ours for that one.
        """
        self._await_reader(True)
        cycle = self.cycle
        if not (self._owes_an_answer() or (cycle and cycle.response_started and not cycle.response_complete)):
            self.config.refused(status)
            body = error_body(status, message, path=self._path())
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            head += f"x-request-id: {uuid4().hex}\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self._drop_answers()
        self.transport.close()

    def _path(self) -> str:
        """The path asked for, as far as it has come; empty between requests."""
        return "" if self._whole else self.url.partition(b"?")[0].decode("ascii", "replace")
