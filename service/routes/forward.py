"""The forward of one layer in JSON: a plain route, outside FastAPI's per-call machinery."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..deadline import TIMEOUT_HEADER
from ..forward_json import parse_forward, render_forward
from ..schemas import ErrorBody, ForwardAnswer, ForwardRequest
from .access import gives, read_bytes, service_of, takes

PATH = "/v1/layers/{layer}/forward"


async def forward(request: Request) -> Response:
    """Compute one layer over the tokens of the body."""
    service = service_of(request)
    with service.metrics.forward() as watch:
        spec = service.layer(request.path_params["layer"])
        watch.layer = str(spec.index)
        service.check_admission()
        deadline = service.timeouts.from_header(request.headers.get(TIMEOUT_HEADER))
        call = parse_forward(await read_bytes(request, request.app.state.max_body_bytes), spec)
        watch.num_tokens = call.batch.num_tokens
        body = render_forward(await service.forward_for_client(call, deadline, request.receive))
    return Response(body, media_type="application/json")


def describe() -> dict[str, Any]:
    """The OpenAPI description of the route, which FastAPI does not see."""
    failures = {
        400: "Malformed or contradictory",
        404: "No such layer or adapter",
        413: "Body too large",
        415: "Unknown compression",
    }
    failures |= {500: "The engine failed this call", 503: "No work is taken now", 504: "Past its deadline"}
    return {
        "post": {
            "tags": ["layers"],
            "summary": "Forward",
            "description": "Compute one layer over some tokens. " + (ForwardRequest.__doc__ or ""),
            "operationId": "forward",
            "parameters": [
                {"name": "layer", "in": "path", "required": True, "schema": {"type": "integer"}},
                {"name": TIMEOUT_HEADER, "in": "header", "required": False, "schema": {"type": "number"}},
            ],
            **takes(ForwardRequest),
            "responses": {
                "200": gives(ForwardAnswer, "The layer's output"),
                **{str(status): gives(ErrorBody, text) for status, text in failures.items()},
            },
        }
    }
