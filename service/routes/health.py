"""Whether the service lives and takes work, and its metrics."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..schemas import State
from .access import errors, service_of

router = APIRouter(tags=["operation"])


@router.get("/health", responses=errors(503))
async def health(request: Request) -> State:
    """200 while the process can serve; 503 once its engine has failed for good."""
    lifecycle = service_of(request).lifecycle
    lifecycle.check_alive()
    return State.model_validate({"status": lifecycle.state})


@router.get("/ready", responses=errors(503))
async def ready(request: Request) -> State:
    """200 while a forward would be admitted: not before everything is loaded, and not while draining."""
    lifecycle = service_of(request).lifecycle
    lifecycle.check_admission()
    return State.model_validate({"status": lifecycle.state})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics in the text format."""
    service = service_of(request)
    service.later.catch_up()
    text = generate_latest(service.metrics.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
