"""The heads of requests that a connection may answer without the application: plain ones, read whole."""

import httptools

from .protocol import MAX_HEADERS, OWS

UNUSUAL = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"))
"""Headers of requests that are left to the application."""


class UnusualError(Exception):
    """A head whose request the application has to answer."""


class Head:
    """A request's head as httptools reads it, fed to it alone. Raises ``UnusualError`` unless it is one whole head
    of a request that brings a body of known length, and asks for nothing but an answer."""

    def __init__(self, head: bytes) -> None:
        self.url = b""
        self.listed: list[tuple[bytes, bytes]] = []
        self._ended = self._has_body = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise UnusualError from None
        self.headers = dict(self.listed)
        if not (self._ended and parser.get_http_version() == "1.1" and parser.should_keep_alive()):
            raise UnusualError
        if self._has_body or len(self.listed) > MAX_HEADERS or self.headers.keys() & UNUSUAL:
            raise UnusualError

    def body_bytes(self, most: int) -> int:
        """How many bytes of body follow. Raises ``UnusualError`` unless they are told, and at most ``most``."""
        length = self.headers.get(b"content-length", b"")
        if not length.isdigit() or (count := int(length)) > most:
            raise UnusualError
        return count

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.listed.append((name.lower(), value.strip(OWS)))

    def on_headers_complete(self) -> None:
        self._ended = True

    def on_body(self, _body: bytes) -> None:
        self._has_body = True  # the parser's head ends before ours

    def on_message_complete(self) -> None:
        self._has_body = True  # of no byte
