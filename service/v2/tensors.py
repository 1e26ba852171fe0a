"""The values of one input: bytes of the body seen as a tensor where they lie, or JSON data."""

from collections.abc import Mapping
from struct import Struct

import torch
from torch import Tensor

from ...layer.errors import RequestError
from ..json_arrays import JSON_KINDS, Array, expert_ids, flat_matrix, floats, kind, matrix
from .header import Input

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
}
LENGTH = Struct("<I")
"""What stands before each element of BYTES."""


def read_matrix(given: Input, values: memoryview, num_experts: int) -> Tensor:
    """An input of checked datatype, shape ``[T, N]`` and size as a tensor; ``values`` are its bytes, if it has any.

    Raises ``RequestError`` where numbers are not as many as the shape says, or expert ids out of range.
    """
    rows, columns = given.shape
    if given.size is None:
        numbers = _numbers(given, rows, columns)
        return expert_ids(numbers, num_experts) if given.datatype.startswith("INT") else floats(numbers)
    dtype = DTYPES[given.datatype]
    if given.size == 0:
        return torch.empty(rows, columns, dtype=dtype)
    tensor = torch.frombuffer(values, dtype=dtype).view(rows, columns)
    return tensor.clone() if tensor.data_ptr() % dtype.itemsize else tensor


def check_matrix_size(given: Input) -> None:
    """Raise ``RequestError`` where an input of checked datatype and shape ``[T, N]`` says that it has more bytes or
    fewer than they take."""
    rows, columns = given.shape
    wanted = rows * columns * DTYPES[given.datatype].itemsize
    if given.size is not None and given.size != wanted:
        taken = f"{wanted} bytes as {given.datatype} {list(given.shape)}"
        raise RequestError(f"{given.name} should be {taken}, got {given.size}", given.name)


def read_names(given: Input, values: memoryview) -> list[str | None] | str | None:
    """Adapters of a BYTES input of checked shape: one name for all tokens, or one for each; empty ones are None.

    Raises ``RequestError``.
    """
    [count] = given.shape
    if given.size is None:
        return _names_of_json(given, count)
    content = bytes(values)
    if content and count:  # most often one name for all, which one comparison finds out
        end = 4 + LENGTH.unpack_from(content)[0] if len(content) >= 4 else 0
        if end * count == len(content) and (element := content[:end]) * count == content:
            return _name(element[4:])
    return _names_of_bytes(given, content, count)


def _names_of_bytes(given: Input, content: bytes, count: int) -> list[str | None]:
    names: list[str | None] = []
    known: dict[bytes, str | None] = {}
    place = 0
    while len(names) < count and place + 4 <= len(content):
        start = place + 4
        place = start + LENGTH.unpack_from(content, place)[0]
        if place > len(content):
            raise RequestError(f"{given.name}: element {len(names)} is longer than the tensor's bytes", given.name)
        element = content[start:place]
        if element not in known:
            known[element] = _name(element)
        names.append(known[element])
    if len(names) < count or place != len(content):
        wanted = f"{given.name} should be {count} strings, each behind its length"
        raise RequestError(f"{wanted}, got {len(names)} and {len(content) - place} bytes more", given.name)
    return names


def _name(element: bytes) -> str | None:
    try:
        return element.decode() or None
    except UnicodeDecodeError:
        raise RequestError("adapter should name adapters in UTF-8, got bytes that are not", "adapter") from None


def _names_of_json(given: Input, count: int) -> list[str | None]:
    names = given.data
    wanted = f"{given.name} should be a list of {count} strings"
    if not isinstance(names, list):
        raise RequestError(f"{wanted}, got {kind(names)}", given.name)
    if len(names) != count:
        raise RequestError(f"{wanted}, got {len(names)}", given.name)
    if strangers := set(map(type, names)) - {str}:
        raise RequestError(f"{wanted}, got {JSON_KINDS.get(strangers.pop(), 'null')} among them", given.name)
    return [name or None for name in names]


def _numbers(given: Input, rows: int, columns: int) -> Array:
    """JSON data, nested or flat."""
    if isinstance(given.data, list) and given.data and not isinstance(given.data[0], list):
        return flat_matrix(given.data, given.name, rows, columns)
    return matrix(given.data, given.name, rows, columns)
