"""What ``/openapi.json`` says: every request that is answered, those that FastAPI does not see too, and the keys."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from .errors import speaks_v2
from .keys import OPEN_PATHS, Keys, Right
from .routes import forward, put_adapter
from .schemas import BODIES, ErrorBody, ForwardAnswer
from .v2.description import SCHEMAS, describe_v2

Json = dict[str, Any]

KEY = "key"
SCHEMES: Json = {
    KEY: {"type": "http", "scheme": "bearer", "description": "An `--api-key`, or the `--admin-api-key` of the service"}
}


def describe(app: FastAPI, keys: Keys) -> Json:
    """The OpenAPI document of ``app`` behind ``keys``, made once."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: Json = document["paths"]
    paths[forward.PATH] = forward.describe()
    paths[put_adapter.PATH] |= put_adapter.describe()
    paths |= describe_v2()
    models = [(kind, "validation") for kind in (*BODIES, ForwardAnswer, ErrorBody)]
    _, extra = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components: Json = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(extra["$defs"] | SCHEMAS)
    components["securitySchemes"] = SCHEMES
    for path, item in paths.items():
        for method, operation in item.items():
            operation["responses"].pop("422", None)
            if path.encode() not in OPEN_PATHS:
                _tell_of_key(operation, path, keys.needed(method.upper(), path.encode()))
    app.openapi_schema = document
    return document


def _tell_of_key(operation: Json, path: str, needed: Right) -> None:
    """Say which key ``operation`` takes: any that is sent where none is ``needed``."""
    operation["security"] = [{KEY: []}] if needed else [{}, {KEY: []}]
    error = "V2Error" if speaks_v2(path) else ErrorBody.__name__
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    if needed:
        operation["responses"]["401"] = {"description": "No key that is known", "content": content}
    if needed is Right.ADMINISTER:
        operation["responses"].setdefault("403", {"description": "Not the admin key", "content": content})
