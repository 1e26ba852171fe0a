"""The ASGI application: routes, error shape, body limit, keys and request ids around one service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from .body import BodyLimitMiddleware
from .errors import install_error_handlers
from .keys import KeyMiddleware, Keys
from .known_requests import KnownRequests
from .request_id import MadeIds, RequestIdMiddleware
from .routes import adapters, forward, health, layers
from .routes.put_adapter import PutAdapters
from .schemas import BODIES, ErrorBody, ForwardAnswer
from .service import MoeService
from .v2.app import V2
from .v2.description import SCHEMAS, describe_v2
from .v2.direct import DirectInferences


class Application:
    """The whole ASGI application, and the requests ``known`` that a connection may answer without it."""

    def __init__(self, app: ASGIApp, known: KnownRequests) -> None:
        self._app = app
        self.known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(service: MoeService, *, max_body_bytes: int, keys: Keys | None = None) -> Application:
    """The whole application; its lifespan starts and stops ``service``. Without ``keys`` it is open.

    The middlewares are plain ASGI and lie around FastAPI, so that its own error answers carry the
    request id as well.
    """
    keys, made = keys or Keys(), MadeIds()
    app: ASGIApp = PutAdapters(routed(service, max_body_bytes), service, max_body_bytes)
    app = BodyLimitMiddleware(V2(app, service, max_body_bytes), max_body_bytes)
    app = RequestIdMiddleware(KeyMiddleware(app, keys) if keys else app, made, service.metrics.answered)
    return Application(app, DirectInferences(service, keys, made, max_body_bytes))


def routed(service: MoeService, max_body_bytes: int) -> FastAPI:
    """The routes over ``service``, without the middlewares; bodies expand to ``max_body_bytes`` at most."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="moelet", version=__version__, lifespan=lifespan, redirect_slashes=False, redoc_url=None)
    app.state.service = service
    app.state.max_body_bytes = max_body_bytes
    install_error_handlers(app)
    app.add_route(forward.PATH, forward.forward, methods=["POST"])
    for part in (health, layers, adapters):
        app.include_router(part.router)
    app.openapi = lambda: app.openapi_schema or describe(app)  # type: ignore[method-assign]
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the routes and bodies that FastAPI does not see."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    document["paths"][forward.PATH] = forward.describe()
    document["paths"] |= describe_v2()
    models = [(kind, "validation") for kind in (*BODIES, ForwardAnswer, ErrorBody)]
    _, extra = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(extra["$defs"] | SCHEMAS)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    app.openapi_schema = document
    return document
