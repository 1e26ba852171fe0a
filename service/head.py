"""Answers ``HEAD`` as it answers ``GET``, for health checks and for people: the server leaves the body out."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Has ``app`` answer ``HEAD`` as the ``GET`` of the same path."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)
