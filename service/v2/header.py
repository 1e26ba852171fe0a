"""The JSON part of an inference request: every field's kind checked, no tensor looked at."""

import re
from typing import Any, NamedTuple

from ...layer.errors import RequestError
from ..json_arrays import kind

BINARY_SIZE = "binary_data_size"
OUTPUT_TYPES = ("BF16", "FP16", "FP32")
OUTPUT = "hidden_states"
IGNORED = frozenset({"priority", "sequence_id", "sequence_start", "sequence_end", "content_type", "headers"})
"""Parameters of a request that clients of other servers send, and that mean nothing to a layer."""

PARAMETERS = ("adapter", "timeout", "output_datatype", "binary_data_output")
MOST = 2**31 - 1
"""Of a dimension, and of the bytes of a tensor."""

SURROGATE = re.compile("[\ud800-\udfff]")


class Input(NamedTuple):
    """One tensor as it is described: its values are ``size`` bytes behind the JSON, or ``data`` where that is None."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int | None
    data: Any


class InferRequest(NamedTuple):
    """What the JSON part asks for.

    ``binary``    the output goes as bytes behind the answer's JSON
    ``datatype``  of the output, or None for the usual one
    ``adapter``   one for all tokens, or None
    ``timeout``   microseconds, or None
    """

    id: str | None
    inputs: tuple[Input, ...]
    binary: bool
    datatype: str | None
    adapter: str | None
    timeout: int | None


def read_header_length(sent: bytes | None) -> int | None:
    """``Inference-Header-Content-Length`` as it was sent. Raises ``RequestError``."""
    if sent is None:
        return None
    if not (sent.isdigit() and len(sent) <= 10):
        shown = sent[:40].decode("latin-1")
        raise RequestError(f"Inference-Header-Content-Length should be a number of bytes, got {shown!r}")
    return int(sent)


def read_header(sent: dict[str, Any]) -> InferRequest:
    """``sent`` checked. Fields that the protocol does not know are ignored, tensors and parameters are not.

    Raises ``RequestError`` naming the field at fault.
    """
    parameters = _object(sent, "parameters", "")
    for name in parameters:
        if name not in PARAMETERS and name not in IGNORED and not name.startswith("triton_"):
            raise RequestError(f"unknown parameter {name!r}: the parameters are {', '.join(PARAMETERS)}", "parameters")
    datatype = parameters.get("output_datatype")
    if datatype is not None and datatype not in OUTPUT_TYPES:
        raise RequestError(f"output_datatype should be one of {', '.join(OUTPUT_TYPES)}, got {shown(datatype)}")
    return InferRequest(
        id=_text(sent.get("id"), "id"),
        inputs=_inputs(sent),
        binary=_is_binary(sent, parameters),
        datatype=datatype,
        adapter=_text(parameters.get("adapter"), "the parameter adapter"),
        timeout=_timeout(parameters.get("timeout")),
    )


def shown(value: Any) -> str:
    """``value`` as JSON calls it, or itself where it is short and plain."""
    if isinstance(value, str | int | float) and len(text := repr(value)) <= 80:
        return text
    return kind(value)


def _inputs(sent: dict[str, Any]) -> tuple[Input, ...]:
    inputs = sent.get("inputs")
    if not isinstance(inputs, list):
        raise RequestError(f"inputs should be a list of tensors, got {kind(inputs)}", "inputs")
    return tuple([_input(item, f"inputs[{i}]") for i, item in enumerate(inputs)])


def _input(item: Any, place: str) -> Input:
    if not isinstance(item, dict):
        raise RequestError(f"{place} should be an object, got {kind(item)}", "inputs")
    name, datatype = _name(item, "name", place), _name(item, "datatype", place)
    parameters = _object(item, "parameters", f"{place}.")
    size = parameters.get(BINARY_SIZE)
    for parameter in parameters:
        if parameter != BINARY_SIZE and parameter not in IGNORED:
            raise RequestError(f"{place}.parameters: {shown(parameter)} is not known here, only {BINARY_SIZE} is", name)
    data = item.get("data")
    if size is not None and not is_count(size):
        raise RequestError(f"{place}.parameters.{BINARY_SIZE} should be a number of bytes, got {shown(size)}", name)
    if (size is None) == (data is None):
        both = "both" if data is not None else "none of them"
        raise RequestError(f"{place} should have either data or the parameter {BINARY_SIZE}, and has {both}", name)
    return Input(name, datatype, _dimensions(item.get("shape"), place, name), size, data)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number, not negative, and not out of all proportion."""
    return type(value) is int and 0 <= value <= MOST


def _dimensions(shape: Any, place: str, name: str) -> tuple[int, ...]:
    wanted = f"{place}.shape should be a list of whole numbers in 0..{MOST}"
    if not isinstance(shape, list):
        raise RequestError(f"{wanted}, got {kind(shape)}", name)
    for dimension in shape:
        if not is_count(dimension):
            raise RequestError(f"{wanted}, got {shown(dimension)} in it", name)
    return tuple(shape)


def _is_binary(sent: dict[str, Any], parameters: dict[str, Any]) -> bool:
    """How the one output goes: as its own parameter says, else as the request's says, else as JSON."""
    usual = _flag(parameters, "binary_data_output", "parameters.")
    outputs = sent.get("outputs")
    if outputs is None or outputs == []:
        return bool(usual)
    if not isinstance(outputs, list):
        raise RequestError(f"outputs should be a list of tensors, got {kind(outputs)}", "outputs")
    if len(outputs) > 1:
        raise RequestError(f"outputs should name {OUTPUT} once, got {len(outputs)} of them", "outputs")
    item = outputs[0]
    if not isinstance(item, dict):
        raise RequestError(f"outputs[0] should be an object, got {kind(item)}", "outputs")
    if (name := _name(item, "name", "outputs[0]")) != OUTPUT:
        raise RequestError(f"unknown output {shown(name)}: the only one is {OUTPUT}", "outputs")
    own = _object(item, "parameters", "outputs[0].")
    for parameter in own:
        if parameter != "binary_data":
            raise RequestError(f"outputs[0].parameters: {shown(parameter)} is not known here, only binary_data is")
    binary = _flag(own, "binary_data", "outputs[0].parameters.")
    return bool(usual if binary is None else binary)


def _flag(parameters: dict[str, Any], name: str, place: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{place}{name} should be a boolean, got {kind(value)}", name)
    return value


def _object(owner: dict[str, Any], field: str, place: str) -> dict[str, Any]:
    value = owner.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{place}{field} should be an object, got {kind(value)}", field)
    return value


def _name(owner: dict[str, Any], field: str, place: str) -> str:
    value = owner.get(field)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{field} should be a string, got {kind(value)}", field)
    return value


def _text(value: Any, field: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{field} should be a string, got {kind(value)}", field)
    if not value.isascii() and SURROGATE.search(value):
        raise RequestError(f"{field} is not Unicode: it has a lone surrogate", field)
    return value


def _timeout(value: Any) -> int | None:
    """Microseconds; 0, as Triton has it, is none."""
    if value is not None and not (type(value) is int and value >= 0):
        raise RequestError(f"timeout should be a whole number of microseconds, got {shown(value)}", "timeout")
    return value or None
