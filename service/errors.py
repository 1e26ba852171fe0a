"""Turns every error into a status and a JSON body: one shape for all answers but 2xx, and under ``/v2`` its own."""

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from ..layer.errors import (
    AdapterBusyError,
    AdapterCapacityError,
    AdapterError,
    AdapterForbiddenError,
    AdapterNotFoundError,
    AdapterNotLoadedError,
    EngineFailedError,
    LayerNotServedError,
    MoeletError,
    RequestError,
)
from .deadline import DeadlineExceededError
from .sent_text import told

LONGEST_PARAM = 200


class BodyTooLargeError(MoeletError):
    """The request's body is larger than ``--max-body-mb`` allows."""


class UnknownCodingError(MoeletError):
    """The request's body is compressed in a way that this service does not know; ``known`` lists the others."""

    def __init__(self, message: str, known: str) -> None:
        super().__init__(message)
        self.known = known


class UnavailableError(MoeletError):
    """The service takes no work at this moment; ``retry_after_s`` says when to ask again."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


STATUSES: tuple[tuple[type[MoeletError], int], ...] = (
    (LayerNotServedError, 404),
    (RequestError, 400),
    (AdapterNotFoundError, 404),
    (AdapterNotLoadedError, 404),
    (AdapterForbiddenError, 403),
    (AdapterBusyError, 409),
    (AdapterCapacityError, 409),
    (AdapterError, 400),
    (BodyTooLargeError, 413),
    (UnknownCodingError, 415),
    (UnavailableError, 503),
    (EngineFailedError, 503),
    (DeadlineExceededError, 504),
)
"""The first class that an error is an instance of gives its status; any other error is 500."""

LOAD_REFUSALS = (400, 403, 404, 409, 413, 415, 500, 503)
"""What a load of an adapter may end with, however it is spelled."""

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


def status_of(error: Exception) -> int:
    """The HTTP status that ``error`` is answered with."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def speaks_v2(path: str) -> bool:
    """Whether ``path`` belongs to the Open Inference Protocol, whose errors have a shape of their own."""
    return path.startswith("/v2") and (len(path) == 3 or path[3] == "/")


def error_body(status: int, message: str, param: str | None = None, *, path: str) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON, or ``{"error": message}`` for a ``path`` of v2."""
    if speaks_v2(path):
        return orjson.dumps({"error": told(message)})
    kind = TYPES.get(status) or HTTPStatus(status).phrase.title().replace(" ", "") + "Error"
    error = {"message": told(message), "type": kind, "param": param and told(param, LONGEST_PARAM), "code": status}
    return orjson.dumps({"error": error})


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None, *, path: str
) -> Response:
    """The answer to a request for ``path``, in the error shape that is spoken there."""
    body = error_body(status, message, param, path=path)
    return Response(body, status, media_type="application/json", headers=dict(headers or {}))


def response_for(error: Exception, path: str) -> Response:
    """The answer to a request for ``path`` that ended in ``error``; what is not ours tells nothing of the inside."""
    if isinstance(error, ClientDisconnect):
        return error_response(400, "the connection ended before the body was complete", path=path)
    if not isinstance(error, MoeletError):
        return error_response(500, "an unexpected error happened in the service; its log has the details", path=path)
    return error_response(status_of(error), str(error), getattr(error, "param", None), _headers_of(error), path=path)


def _headers_of(error: MoeletError) -> dict[str, str]:
    """What the client may do instead."""
    match error:
        case UnavailableError():
            return {"Retry-After": str(error.retry_after_s)}
        case UnknownCodingError():
            return {"Accept-Encoding": error.known}
        case _:
            return {}


def validation_sentence(errors: list[Any]) -> tuple[str, str | None]:
    """The first of pydantic's findings as (sentence, field), its ``loc`` being the field's alone."""
    first = errors[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "missing":
        return f"{param} is required and was not sent", param
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    text = first["msg"][:1].lower() + first["msg"][1:]
    came = repr(first.get("input"))
    return f"{param or 'the body'}: {text}, got {came if len(came) <= 80 else came[:77] + '...'}", param


def request_error(error: ValidationError) -> RequestError:
    """What pydantic found wrong with a body, as a ``RequestError``."""
    return RequestError(*validation_sentence(list(error.errors(include_url=False))))


def listed(methods: Iterable[str]) -> str:
    """``methods`` as ``Allow`` lists them; where there is ``GET`` there is ``HEAD``."""
    methods = set(methods)
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Register the handlers that give every error of ``app`` its status and shape; ``routes`` are all that it has."""

    def allowed(request: Request) -> str:
        """What the path of ``request`` takes: Starlette names the methods of the first route there alone."""
        there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        return listed(method for route in there if isinstance(route, Route) for method in route.methods or ())

    async def on_error(request: Request, error: Exception) -> Response:
        return response_for(error, request.scope["path"])

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        where = f"{request.method} {path}"
        message, headers = str(error.detail), error.headers
        if error.status_code == 404:
            message = f"there is no {where} here; /docs lists what there is"
        elif error.status_code == 405:
            message, headers = f"{where} is not allowed here", {"Allow": allowed(request)}
        return error_response(error.status_code, message, headers=headers, path=path)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # less where FastAPI looked for it
        return error_response(400, *validation_sentence(found), path=request.scope["path"])

    app.add_exception_handler(MoeletError, on_error)
    app.add_exception_handler(ClientDisconnect, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_error)
