"""``PUT /v1/adapters/{name}``: a plain route, as forwards have it, because forwards wait while the event loop swaps."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ...layer.adapter_version import check_name
from ..errors import LOAD_REFUSALS
from ..schemas import AdapterRecord, PutAdapter
from ..service import MoeService
from .access import errors, gives, read_body, service_of, takes

PATH = "/v1/adapters/{name}"
BEFORE_NAME = PATH.removesuffix("{name}")


async def put_adapter(request: Request) -> Response:
    """Load an adapter, or a new version of it. Most of these requests do not come here, see ``direct_loads.py``."""
    service = service_of(request)
    name = request.path_params["name"]
    with service.metrics.adapter_load():
        check_name(name, "name")
        record, status = await put(service, name, await read_body(request, PutAdapter))
    return Response(record, status, media_type="application/json")


async def put(service: MoeService, name: str, body: PutAdapter) -> tuple[bytes, int]:
    """Load what ``body`` says as ``name``; its record as JSON, and the status. Raises ``MoeletError``."""
    with service.lifecycle.admit():
        version, created = await service.adapters.load(name, body.path, param="path", pinned=body.pinned, replace=True)
    return orjson.dumps(service.adapters.record(version)), 201 if created else 200


def describe() -> dict[str, Any]:
    """The OpenAPI description of the request, which FastAPI does not see."""
    refusals = {str(status): answer for status, answer in errors(*LOAD_REFUSALS).items()}
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
