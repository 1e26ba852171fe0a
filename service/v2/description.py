"""What ``/openapi.json`` says of ``/v2``, which FastAPI does not see."""

from typing import Any

from ..deadline import TIMEOUT_HEADER
from ..errors import LOAD_REFUSALS

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
PARAMETERS: Json = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
SHAPE: Json = {"type": "array", "items": COUNT}
STATE: Json = {"enum": ["READY", "UNAVAILABLE"]}


def fields(required: str, /, **properties: Json) -> Json:
    """An object with ``properties``, those named in ``required`` always there."""
    return {"type": "object", "properties": properties, "required": required.split()}


SCHEMAS: Json = {
    "V2Error": fields("error", error=TEXT),
    "V2Server": fields("name version extensions", name=TEXT, version=TEXT, extensions={"type": "array", "items": TEXT}),
    "V2Live": fields("live", live={"type": "boolean"}),
    "V2Ready": fields("ready", ready={"type": "boolean"}),
    "V2ModelReady": fields("name ready", name=TEXT, ready={"type": "boolean"}),
    "V2Model": fields(
        "name versions platform inputs outputs",
        name=TEXT,
        versions={"type": "array", "items": TEXT},
        platform=TEXT,
        inputs={"type": "array", "items": {"$ref": "#/components/schemas/V2TensorMetadata"}},
        outputs={"type": "array", "items": {"$ref": "#/components/schemas/V2TensorMetadata"}},
    ),
    "V2TensorMetadata": fields(
        "name datatype shape",
        name=TEXT,
        datatype=TEXT,
        shape={"type": "array", "items": {"type": "integer"}},
        optional={"type": "boolean"},
    ),
    "V2Input": fields(
        "name shape datatype",
        name={"enum": ["hidden_states", "topk_ids", "topk_weights", "router_logits", "adapter"]},
        shape=SHAPE,
        datatype={"enum": ["BF16", "FP16", "FP32", "INT32", "INT64", "BYTES"]},
        parameters=fields("", binary_data_size=COUNT),
        data={"type": "array", "description": "nested or flat, in row-major order; not with binary_data_size"},
    ),
    "V2RequestedOutput": fields(
        "name", name={"const": "hidden_states"}, parameters=fields("", binary_data={"type": "boolean"})
    ),
    "V2InferRequest": fields(
        "inputs",
        id=TEXT,
        parameters=fields(
            "",
            adapter={**TEXT, "description": "one adapter for all tokens"},
            timeout={**COUNT, "description": "microseconds, 0 for none"},
            output_datatype={"enum": ["BF16", "FP16", "FP32"]},
            binary_data_output={"type": "boolean"},
        ),
        inputs={"type": "array", "items": {"$ref": "#/components/schemas/V2Input"}},
        outputs={"type": "array", "items": {"$ref": "#/components/schemas/V2RequestedOutput"}, "maxItems": 1},
    ),
    "V2Output": fields(
        "name datatype shape", name=TEXT, datatype=TEXT, shape=SHAPE, parameters=PARAMETERS, data={"type": "array"}
    ),
    "V2InferResponse": fields(
        "model_name model_version outputs parameters",
        model_name=TEXT,
        model_version=TEXT,
        id=TEXT,
        parameters=fields("adapter_versions", adapter_versions={**TEXT, "description": "JSON: versions by name"}),
        outputs={"type": "array", "items": {"$ref": "#/components/schemas/V2Output"}},
    ),
    "V2IndexRequest": fields("", ready={"type": "boolean", "description": "list only models that are ready"}),
    "V2Index": {
        "type": "array",
        "items": fields("name version state reason", name=TEXT, version=TEXT, state=STATE, reason=TEXT),
    },
    "V2Change": fields("name version state", name=TEXT, version=TEXT, state=STATE),
    "V2LoadRequest": fields(
        "parameters",
        parameters=fields(
            "config", config={**TEXT, "description": 'JSON: {"lora_path": folder, "pinned": true or false}'}
        ),
    ),
    "V2Parameters": fields("", parameters=PARAMETERS),
}

INFER = """Compute one layer over some tokens. Tensors are JSON data, or lie as bytes behind the JSON in the order of
the inputs; `Inference-Header-Content-Length` then says how long the JSON is. The output is JSON unless
`binary_data_output`, or its own `binary_data`, is true. Bodies may be compressed by gzip or deflate."""


def describe_v2() -> Json:
    """The paths under ``/v2``."""
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    adapter = "/v2/repository/models/{adapter}"
    paths: Json = {
        "/v2": _get("The server and its extensions", "V2Server"),
        "/v2/health/live": _get("Whether the process can serve", "V2Live", 503),
        "/v2/health/ready": _get("Whether work is taken", "V2Ready", 503),
        "/v2/repository/index": _post("The layers and adapters served", "V2Index", "V2IndexRequest", 400, 413, 415),
        f"{adapter}/load": _post("Load an adapter, or replace it", "V2Change", "V2LoadRequest", *LOAD_REFUSALS),
        f"{adapter}/unload": _post("Unload an adapter", "V2Change", "V2Parameters", 400, 404, 409, 413, 415, 503),
    }
    for path in (model, version):
        paths[path] = _get("The inputs and outputs of a layer", "V2Model", 404)
        paths[f"{path}/ready"] = _get("Whether a model takes work", "V2ModelReady", 404, 503)
        paths[f"{path}/infer"] = _infer()
    for path, item in paths.items():
        for method, operation in item.items():
            operation["operationId"] = f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}"
            operation["parameters"] = [*_path_parameters(path), *operation.get("parameters", ())]
    return paths


def _path_parameters(path: str) -> list[Json]:
    examples = {"model": "layers.0", "version": "1", "adapter": "demo-a"}
    return [
        {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}, "example": example}
        for name, example in examples.items()
        if f"{{{name}}}" in path
    ]


def _get(summary: str, answer: str, *errors: int) -> Json:
    return {"get": {"tags": ["v2"], "summary": summary, "responses": _responses(answer, errors)}}


def _post(summary: str, answer: str, body: str, *errors: int) -> Json:
    content = {"application/json": {"schema": _reference(body)}}
    described = {"tags": ["v2"], "summary": summary, "requestBody": {"content": content}}
    return {"post": {**described, "responses": _responses(answer, errors)}}


def _infer() -> Json:
    item = _post("Forward", "V2InferResponse", "V2InferRequest", 400, 404, 413, 415, 500, 503, 504)
    operation: Json = item["post"]
    octets: Json = {"schema": {**TEXT, "format": "binary"}}
    operation["description"] = INFER
    operation["requestBody"]["required"] = True
    operation["requestBody"]["content"]["application/octet-stream"] = octets
    operation["responses"]["200"]["content"]["application/octet-stream"] = octets
    operation["parameters"] = [
        {"name": "Inference-Header-Content-Length", "in": "header", "schema": COUNT},
        {"name": TIMEOUT_HEADER, "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0}},
    ]
    return item


def _responses(answer: str, errors: tuple[int, ...]) -> Json:
    def of(schema: str, text: str) -> Json:
        return {"description": text, "content": {"application/json": {"schema": _reference(schema)}}}

    return {"200": of(answer, "OK"), **{str(status): of("V2Error", "Refused") for status in errors}}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
