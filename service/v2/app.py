"""The ASGI application of everything under ``/v2``: paths to handlers with no framework between."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ...layer.errors import MoeletError
from ..errors import error_response, listed, response_for, speaks_v2
from ..service import MoeService
from .exchange import Handler, Incoming, send_reply
from .inference import Inferences
from .repository import Repository

REMEMBERED = 512
LONGEST_REMEMBERED = 200
"""Paths whose routes are kept, and the characters of the longest of them."""


class Route(NamedTuple):
    """A method and a path, whose variable parts stand in braces."""

    method: str
    path: str
    handler: Handler


class V2:
    """Serves the Open Inference Protocol over ``service`` and leaves every other path to ``app``.

    A body expands to ``max_body_bytes`` at most.
    """

    def __init__(self, app: ASGIApp, service: MoeService, max_body_bytes: int) -> None:
        self.app = app
        self.inferences = Inferences(service, max_body_bytes)
        self._paths = _Paths(routes(service, self.inferences, max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not speaks_v2(path := scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            handler, names = self._paths.find(scope["method"], path)
            reply = await handler(Incoming(names, dict(scope["headers"]), receive))
        except ClientDisconnect:
            return
        except MoeletError as error:
            await response_for(error, path)(scope, receive, send)
        except HTTPException as error:
            await error_response(error.status_code, error.detail, headers=error.headers, path=path)(
                scope, receive, send
            )
        else:
            await send_reply(reply, send)


def routes(service: MoeService, inferences: Inferences, max_body_bytes: int) -> tuple[Route, ...]:
    """All that is served under ``/v2``."""
    models = inferences.models
    repository = Repository(service, models, max_body_bytes)
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    return (
        Route("GET", "/v2", models.server),
        Route("GET", "/v2/health/live", models.live),
        Route("GET", "/v2/health/ready", models.ready),
        Route("POST", f"{model}/infer", inferences.infer),
        Route("POST", f"{version}/infer", inferences.infer),
        Route("GET", model, models.metadata),
        Route("GET", version, models.metadata),
        Route("GET", f"{model}/ready", models.model_ready),
        Route("GET", f"{version}/ready", models.model_ready),
        Route("POST", "/v2/repository/index", repository.index),
        Route("POST", "/v2/repository/models/{adapter}/load", repository.load),
        Route("POST", "/v2/repository/models/{adapter}/unload", repository.unload),
    )


class _Paths:
    """Finds the route of a path among those with as many parts, and remembers those that were asked for lately."""

    def __init__(self, served: Iterable[Route]) -> None:
        self._by_length: dict[int, list[tuple[list[str | None], dict[str, Handler]]]] = {}
        for route in served:
            parts = [None if part.startswith("{") else part for part in route.path.split("/")]
            self._by_length.setdefault(len(parts), []).append((parts, {route.method: route.handler}))
        self._remembered = lru_cache(REMEMBERED)(self._find)

    def find(self, method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
        """The handler, and the variable parts of ``path``. Raises ``HTTPException`` 404 and 405."""
        return self._remembered(method, path) if len(path) <= LONGEST_REMEMBERED else self._find(method, path)

    def _find(self, method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
        parts = path.split("/")
        for wanted, handlers in self._by_length.get(len(parts), ()):
            names = _match(wanted, parts)
            if names is not None:
                if method in handlers:
                    return handlers[method], names
                raise HTTPException(405, f"{method} {path} is not allowed here", {"Allow": listed(handlers)})
        raise HTTPException(404, f"there is no {method} {path} here")


def _match(wanted: Iterable[str | None], parts: Iterable[str]) -> tuple[str, ...] | None:
    names = []
    for expected, part in zip(wanted, parts, strict=True):
        if expected is None and part:
            names.append(part)
        elif expected != part:
            return None
    return tuple(names)
