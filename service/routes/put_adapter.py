"""``PUT /v1/adapters/{name}``, which comes while forwards run, with no framework between it and the service."""

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...layer.adapter_version import check_name
from ...layer.errors import MoeletError
from ..errors import error_response, response_for
from ..schemas import PutAdapter
from ..service import MoeService
from .access import checked, read_bytes

PATH = "/v1/adapters/"


class PutAdapters:
    """Loads adapters into ``service`` and leaves every other request to ``app``, which describes this one too.

    All that the event loop does for a swap, forwards wait for: FastAPI takes twice as long as the rest of it together.
    """

    def __init__(self, app: ASGIApp, service: MoeService, max_body_bytes: int) -> None:
        self._app = app
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "PUT" or not (name := name_in(scope["path"])):
            await self._app(scope, receive, send)
            return
        try:
            response = await self._load(name, Request(scope, receive))
        except ClientDisconnect:
            text = "the connection ended before the body was complete"
            response = error_response(400, text, path=scope["path"])
        except MoeletError as error:
            response = response_for(error, scope["path"])
        await response(scope, receive, send)

    async def _load(self, name: str, request: Request) -> Response:
        service = self._service
        with service.metrics.adapter_load():
            check_name(name, "name")
            body = checked(PutAdapter, await read_bytes(request, self._max_body_bytes))
            with service.lifecycle.admit():
                version, created = await service.adapters.load(
                    name, body.path, param="path", pinned=body.pinned, replace=True
                )
        record = orjson.dumps(service.adapters.record(version))
        return Response(record, 201 if created else 200, media_type="application/json")


def name_in(path: str) -> str:
    """The adapter that ``path`` names, or nothing."""
    name = path[len(PATH) :] if path.startswith(PATH) else ""
    return "" if "/" in name else name
