"""HTTP/1.1 with a way past the application: requests of a known kind, one after the other, without its layers."""

import time
from collections.abc import Sequence

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from .known_requests import Answering, Body, KnownRequest, header_lines
from .protocol import Protocol

HEAD_END = b"\r\n\r\n"
LONGEST_HEAD = 4096
"""In so many bytes a head has to end for its request to be one of those."""

JOINED = 65536
"""An answer of up to so many bytes goes out as one piece."""


class FastPathProtocol(Protocol):
    """``Protocol`` with a way past the parser and the application, for requests that ``config.known`` knows.

    A request takes it from the first byte of its head, where nothing else is on the connection, or not at all. What
    comes behind it waits until it is answered. In a connection's life the two ways take turns in any order.
    """

    _known: KnownRequest | None = None
    _body: Body | None = None
    _begun: Answering | None = None
    _head = b""
    _came = 0.0
    _place = 0
    _held: bytes | bytearray = b""
    _ends = False
    _rests_since = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: what it waited for is not computed, unless it is being computed already."""
        self._drop_answers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take the request on the fast path, or what it brings more; else parse what came."""
        if self._known is not None:
            self._go_on(data)
            return
        if self._is_free() and (end := data.find(HEAD_END, 0, LONGEST_HEAD)) >= 0:
            end += len(HEAD_END)
            head = data[:end]
            if (requests := self.config.known) and (known := requests.find(head)):
                self._await_request(False)  # its time begins now
                self._body, self._place = known.new_body(), 0
                self._known, self._head, self._came = known, head, time.monotonic()
                self._go_on(memoryview(data)[end:])
                return
        super().data_received(data)

    def _is_free(self) -> bool:
        """Whether the next byte is the first of a request, and no other is being answered."""
        cycle = self.cycle
        at_rest = cycle is None or (self._whole and cycle.response_complete)
        if not at_rest or self._in_head or self._head_bytes or self.pipeline:
            return False
        return not (self.flow.write_paused or self.transport.is_closing())

    def _go_on(self, data: bytes | memoryview) -> None:
        """More of the request's body, and of what is behind it."""
        body, place = self._body, self._place
        if body is None:
            self._hold(data)
            return
        octets = body.octets
        end = place + len(data)
        if end < len(octets):
            octets[place:end] = data
            self._place = end
            self._await_request(True)
            return
        room = len(octets) - place
        octets[place:] = data[:room]
        if len(data) > room:
            self._hold(data[room:])
        self._begin(body)

    def _hold(self, data: bytes | memoryview) -> None:
        """Keep what came too early. Read no more where that is much; else go on, or nobody saw the client leave."""
        if not self._held:
            self._held = bytearray()
        self._held += data
        if len(self._held) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _begin(self, body: Body) -> None:
        known = self._known
        assert known is not None
        self._await_request(False)
        self._body = None
        self._begun = known.begin(body, self._came, self._answer)
        if self._begun is None:
            self._known = None
            super().data_received(self._head + body.octets)
            if self._ends:
                super().shutdown()
            elif self._held:
                self._read_on()

    def _answer(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Write the answer, and go on with what came meanwhile."""
        self._known = self._begun = None
        self._whole = True
        transport = self.transport
        if transport.is_closing():
            return
        self.server_state.total_requests += 1
        ends = b"connection: close\r\n" if self._ends else b""
        pieces = (STATUS_LINE[status], self._default_lines(), ends, headers, *body)
        if sum(map(len, body)) <= JOINED:
            transport.write(b"".join(pieces))
        else:
            transport.writelines((b"".join(pieces[:4]), *body))
        if self._ends:
            self._await_reader(True)
            transport.close()
            return
        self._rests_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)
        if self._held:
            self._read_on()

    def _read_on(self) -> None:
        held, self._held = bytes(self._held), b""
        if len(held) > HIGH_WATER_LIMIT:
            self.flow.resume_reading()
        try:
            self.data_received(held)
        except BaseException:  # as the transport does where it is the caller: nobody knows what comes next on it
            self.transport.abort()
            raise

    def _default_lines(self) -> bytes:
        """The server's own headers, made anew whenever they are others."""
        headers = self.server_state.default_headers
        known, lines = self.config.default_lines
        if headers is not known:
            lines = header_lines(headers)
            self.config.default_lines = (headers, lines)
        return lines

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """The client may have sent nothing more: the timer is not set anew with each request on the fast path."""
        self.timeout_keep_alive_task = None
        if self._known is not None:  # its answer sets it
            return
        left = self._rests_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._wait_for_more(left)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """End the connection, once it is answered what is on it."""
        if self._known is not None:
            self._ends = True
        else:
            super().shutdown()

    def _owes_an_answer(self) -> bool:
        return self._begun is not None or super()._owes_an_answer()

    def _drop_answers(self) -> None:
        known, begun = self._known, self._begun
        self._known = self._body = self._begun = None
        if begun is not None:
            begun.drop()
        elif known is not None:  # the application learns of it too, and counts it with those whose clients left
            super().data_received(self._head)
        super()._drop_answers()
