"""``PUT /v1/adapters/{name}`` in the application, with no framework between it and the service."""

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...layer.adapter_version import check_name
from ...layer.errors import MoeletError
from ..errors import response_for
from ..schemas import AdapterRecord, PutAdapter
from ..service import MoeService
from .access import checked, errors, gives, read_bytes, takes

PATH = "/v1/adapters/{name}"
BEFORE_NAME = PATH.removesuffix("{name}")


class PutAdapters:
    """Loads adapters into ``service`` and leaves every other request to ``app``.

    All that the event loop does for a swap, forwards wait for: FastAPI takes twice as long as the rest of it together.
    Most of these requests do not come here either, see ``direct_loads.py``.
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
        except (ClientDisconnect, MoeletError) as error:
            response = response_for(error, scope["path"])
        await response(scope, receive, send)

    async def _load(self, name: str, request: Request) -> Response:
        service = self._service
        with service.metrics.adapter_load():
            check_name(name, "name")
            body = checked(PutAdapter, await read_bytes(request, self._max_body_bytes))
            record, status = await put(service, name, body)
        return Response(record, status, media_type="application/json")


async def put(service: MoeService, name: str, body: PutAdapter) -> tuple[bytes, int]:
    """Load what ``body`` says as ``name``; its record as JSON, and the status. Raises ``MoeletError``."""
    with service.lifecycle.admit():
        version, created = await service.adapters.load(name, body.path, param="path", pinned=body.pinned, replace=True)
    return orjson.dumps(service.adapters.record(version)), 201 if created else 200


def name_in(path: str) -> str:
    """The adapter that ``path`` names, or nothing."""
    name = path[len(BEFORE_NAME) :] if path.startswith(BEFORE_NAME) else ""
    return "" if "/" in name else name


def describe() -> dict[str, Any]:
    """The OpenAPI description of the request, which FastAPI does not see."""
    refusals = {str(status): answer for status, answer in errors(400, 403, 404, 409, 413, 415, 503).items()}
    return {
        "put": {
            "tags": ["adapters"],
            "summary": "Put Adapter",
            "description": "Load an adapter (201), or a new version of it (200); the next call sees its weights.",
            "operationId": "put_adapter",
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            **takes(PutAdapter),
            "responses": {"200": gives(AdapterRecord, "Replaced"), "201": gives(AdapterRecord, "Loaded"), **refusals},
        }
    }
