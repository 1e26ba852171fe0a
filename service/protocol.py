"""HTTP/1.1 below the application: what is no HTTP gets the one error shape too, and a request's head has an end."""

from uuid import uuid4

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import error_body

MAX_HEAD_BYTES = 65536
"""Of a request line and headers that have not ended; what comes in one piece is taken."""


BODY_HEADERS = (b"content-length", b"transfer-encoding")


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, whose own refusals are JSON and carry an ``X-Request-Id``.

    It offers no upgrade, and serves a request that asks for one (as HTTP clients that would rather
    speak HTTP/2 do) as if it did not: with its body, which the parser takes for the other protocol's.
    """

    _in_head = False
    _head_bytes = 0
    _repeats_head = False

    def data_received(self, data: bytes) -> None:
        """Parse what came; 431 once a head that is still open has grown over ``MAX_HEAD_BYTES``."""
        continued = self._in_head
        self._feed(data)
        if continued and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(431, f"the request's headers are longer than this service takes, {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """A request begins with its head."""
        if not self._repeats_head:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if not self._repeats_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has ended."""
        if not self._repeats_head:
            self._in_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has ended, unless the parser left it out."""
        if not (self.parser.should_upgrade() and self._body_headers()):
            super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.refuse(400, "the request is not valid HTTP/1.1")

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
        """Answer with ``status`` and end the connection."""
        body = error_body(status, message, path=self._path())
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        head += f"x-request-id: {uuid4().hex}\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _path(self) -> str:
        """The path asked for, as far as it has come; empty between requests."""
        return self.url.partition(b"?")[0].decode("ascii", "replace") if self._in_head else ""


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How ``app`` is served: HTTP alone, nothing told of the server, logs left to the process."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
    )
