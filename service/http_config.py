"""How uvicorn serves an application here."""

from collections.abc import Callable

from starlette.types import ASGIApp

from .connection_limits import ProtocolConfig, connections_allowed
from .fast_path import FastPathProtocol
from .known_requests import KnownRequests
from .protocol import Protocol


def http_config(
    app: ASGIApp,
    *,
    body_timeout_s: float = 20.0,
    keep_alive_s: int = 5,
    known: KnownRequests | None = None,
    refused: Callable[[int], None] = lambda _status: None,
    ended: Callable[[str], None] = lambda _reason: None,
) -> ProtocolConfig:
    """How ``app`` is served: HTTP alone, nothing told of the server, logs left to the process.

    Requests that are ``known`` do not go through it. A connection that no request is on ends after ``keep_alive_s``;
    the rest is ``ProtocolConfig``'s.
    """
    return ProtocolConfig(
        app,
        known=known,
        body_timeout_s=body_timeout_s,
        max_connections=connections_allowed(),
        refused=refused,
        ended=ended,
        timeout_keep_alive=keep_alive_s,
        http=Protocol if known is None else FastPathProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks where a request came from
        server_header=False,
        lifespan="on",
    )
