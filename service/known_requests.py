"""What a connection may answer without the application: requests that are known by their head."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

Write = Callable[[int, bytes, Sequence[bytes | memoryview]], None]
"""Takes an answer: its status, its header lines with the empty one behind them, and its body in pieces."""


class Answering(Protocol):
    """A request that waits for its answer."""

    def drop(self) -> None:
        """Its client has gone: nothing is to be written."""


class Body:
    """Memory for a request's body: its ``octets``, and what was ``read`` of the last one in it, for who reads it."""

    __slots__ = ("octets", "read")

    def __init__(self, octets: memoryview) -> None:
        self.octets = octets
        self.read: Any = None


class KnownRequest(Protocol):
    """What is known of a request by its head: ``body_bytes`` follow that, one at least."""

    body_bytes: int

    def new_body(self) -> Body:
        """Memory for its body."""

    def begin(self, body: Body, came: float, write: Write) -> Answering | None:
        """Have ``write`` called on a later turn of the event loop; None: the application has to answer.

        The head ``came`` then, by ``time.monotonic``.
        """


class KnownRequests(Protocol):
    """Requests that need not go through the application."""

    def find(self, head: bytes) -> KnownRequest | None:
        """The one with this head, all bytes of it; None: the application has to answer, be it for now."""


class AnyKnown:
    """Requests of several kinds."""

    def __init__(self, *kinds: KnownRequests) -> None:
        self._kinds = kinds

    def find(self, head: bytes) -> KnownRequest | None:
        """As ``KnownRequests.find``, of the first kind that knows it."""
        for kind in self._kinds:
            if (known := kind.find(head)) is not None:
                return known
        return None


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """``headers`` as they are written, without the empty line behind them."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])
