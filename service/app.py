"""The ASGI application: routes, error shape, body limit, keys and request ids around one service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from .body import BodyLimitMiddleware
from .description import describe
from .direct_loads import DirectLoads
from .errors import install_error_handlers
from .head import HeadAsGet
from .keys import KeyMiddleware, Keys
from .known_requests import AnyKnown, KnownRequests
from .request_id import MadeIds, RequestIdMiddleware
from .routes import adapters, forward, health, layers, put_adapter
from .service import MoeService
from .v2.app import V2
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
    v2 = V2(routed(service, max_body_bytes, keys), service, max_body_bytes)
    app: ASGIApp = BodyLimitMiddleware(HeadAsGet(v2), max_body_bytes)
    app = RequestIdMiddleware(KeyMiddleware(app, keys) if keys else app, made, service.metrics.answered)
    inferences = DirectInferences(service, v2.inferences, keys, made, max_body_bytes)
    return Application(app, AnyKnown(inferences, DirectLoads(service, keys, made, max_body_bytes)))


def routed(service: MoeService, max_body_bytes: int, keys: Keys) -> FastAPI:
    """The routes over ``service``, without the middlewares, described as they are behind ``keys``; bodies expand to
    ``max_body_bytes`` at most."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="moelet", version=__version__, lifespan=lifespan, redirect_slashes=False, redoc_url=None)
    app.state.service = service
    app.state.max_body_bytes = max_body_bytes
    app.add_route(forward.PATH, forward.forward, methods=["POST"])
    app.add_route(put_adapter.PATH, put_adapter.put_adapter, methods=["PUT"])
    routers = [part.router for part in (health, layers, adapters)]
    install_error_handlers(app, [*app.routes, *(route for router in routers for route in router.routes)])
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: app.openapi_schema or describe(app, keys)  # type: ignore[method-assign]
    return app
