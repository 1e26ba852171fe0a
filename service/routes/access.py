"""What every route needs: the service behind the application, and a body as a checked model."""

from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..compression import expanded
from ..errors import request_error
from ..schemas import ErrorBody
from ..service import MoeService

Model = TypeVar("Model", bound=BaseModel)


def service_of(request: Request) -> MoeService:
    """The service that the application of ``request`` serves."""
    service = request.app.state.service
    assert isinstance(service, MoeService)
    return service


async def read_bytes(request: Request, max_body_bytes: int) -> bytes:
    """The whole body, expanded, and kept by nobody else. Raises as ``compression.expanded`` does."""
    coding = request.headers.get("content-encoding", "identity").encode("latin-1")
    sent = b"".join([part async for part in request.stream()])
    return bytes(await expanded(sent, coding, max_body_bytes))


async def read_body(request: Request, kind: type[Model]) -> Model:
    """The JSON body as a ``kind``, whatever content type it came with. Raises as ``read_bytes`` does, and
    ``RequestError``."""
    return checked(kind, await read_bytes(request, request.app.state.max_body_bytes))


def checked(kind: type[Model], content: bytes) -> Model:
    """The JSON ``content`` as a ``kind``. Raises ``RequestError``."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise request_error(error) from None


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for OpenAPI: JSON whatever else the route answers with."""
    return {status: gives(ErrorBody, HTTPStatus(status).phrase) for status in statuses}


def gives(kind: type[BaseModel], text: str) -> dict[str, Any]:
    """That a route answers with a ``kind``, which ``text`` says more of, for OpenAPI."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """That a route's body is a ``kind``, for OpenAPI."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
