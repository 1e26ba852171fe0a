"""How long and how many connections may be open, and who is told of those that are ended."""

import resource
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from .known_requests import KnownRequests

MOST_CONNECTIONS = 8192
SPARE_DESCRIPTORS = 128
"""Descriptors that are left for files and libraries when the process may open only few."""


class ProtocolConfig(uvicorn.Config):
    """uvicorn's configuration with the limits of ``Protocol``.

    ``body_timeout_s``   how long a request may take to arrive whole, and an answer to be taken on
    ``max_connections``  open at the same time; a further one is told so and closed
    ``known``            requests that do not go through the application
    ``refused``          told the status of each answer that the application does not give
    ``ended``            told why a connection was ended: ``slow_request`` or ``slow_reader``
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        known: KnownRequests | None,
        body_timeout_s: float,
        max_connections: int,
        refused: Callable[[int], None],
        ended: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self.known = known
        self.default_lines: tuple[object, bytes] = (None, b"")
        self.body_timeout_s = body_timeout_s
        self.max_connections = max_connections
        self.refused = refused
        self.ended = ended


def connections_allowed() -> int:
    """``MOST_CONNECTIONS``, or fewer where the process may not open as many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - SPARE_DESCRIPTORS))
