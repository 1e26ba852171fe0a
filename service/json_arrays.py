"""JSON from unknown hands: an object, and its arrays of numbers, a whole array at a time."""

import json
import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from ..layer.errors import RequestError

Array = np.ndarray[Any, np.dtype[Any]]
JSON_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
MOST_DIMENSIONS = 8
"""Of nested lists, how many levels are told when they are too many."""

INTEGERS = range(-(2**63), 2**64)
"""Numbers that JSON writes as integers and that are read as such; others are read as floats."""
PLAIN_DIGITS = 19
"""With fewer of them an integer is one of those."""
SHOWN_DIGITS = 40


def load_object(text: bytes, what: str = "the body") -> dict[str, Any]:
    """The JSON object in ``text``, which a client knows as ``what``; bare ``NaN``, ``Infinity`` and ``-Infinity`` are
    numbers. A number with a fraction or an exponent, or outside of ``INTEGERS``, is read as float64. Raises
    ``RequestError``, for a number that float64 does not reach too."""
    try:
        value = _load(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {error}") from None
    except OverflowError as error:
        raise RequestError(f"{what} has a number beyond every float64: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} should be a JSON object, got {kind(value)}")
    return value


def kind(value: Any) -> str:
    """What ``value`` is, as JSON calls it."""
    return JSON_KINDS.get(type(value), "null")


def matrix(value: Any, field: str, rows: int | None, columns: int) -> Array:
    """The numbers of nested lists, ``[rows, columns]`` (any number of rows for None).

    Kinds and lengths are looked at before numpy is: it would make strings of everything beside a
    string, each as wide as the longest.
    """
    wanted = f"{field} should be {'T' if rows is None else rows} rows of {columns} numbers"
    if not isinstance(value, list):
        raise RequestError(f"{wanted}, got {kind(value)}", field)
    if not value and not rows:
        return np.empty((0, columns), np.int64)
    if _is_ragged(value):
        raise RequestError(f"{wanted}, got rows of different lengths", field)
    shape = _shape(value)
    if shape != [len(value) if rows is None else rows, columns]:
        raise RequestError(f"{wanted}, got the shape {shape}", field)
    return _numbers(value, chain.from_iterable(value), wanted, field)


def flat_matrix(value: list[Any], field: str, rows: int, columns: int) -> Array:
    """The numbers of one list in row-major order, as ``[rows, columns]``."""
    wanted = f"{field} should be {rows} x {columns} numbers"
    if len(value) != rows * columns:
        raise RequestError(f"{wanted}, got {len(value)}", field)
    return _numbers(value, value, wanted, field).reshape(rows, columns)


def floats(array: Array) -> Tensor:
    """Numbers as fp32."""
    return torch.from_numpy(array.astype(np.float64)).to(torch.float32)


def expert_ids(array: Array, num_experts: int) -> Tensor:
    """Whole numbers in ``-1 .. num_experts - 1`` as int32. Raises ``RequestError`` for others."""
    if array.dtype.kind == "f":  # JSON tells 1.0 and 1 not apart
        fits = (array >= -1) & (array < num_experts) & (np.trunc(array) == array)
        if not fits.all():
            wanted = f"topk_ids should be whole numbers in -1..{num_experts - 1}"
            raise RequestError(f"{wanted}, got {array[~fits][0]:g} among them", "topk_ids")
    elif array.size and (array.min() < -1 or array.max() >= num_experts):
        wrong = array.min() if array.min() < -1 else array.max()
        raise RequestError(f"topk_ids must lie in -1..{num_experts - 1}, got {wrong}", "topk_ids")
    return torch.from_numpy(array.astype(np.int32))


def _load(body: bytes) -> Any:
    """What orjson makes of ``body``, or else Python, which reads the same numbers and bare constants too.

    It is Python that says what is wrong, whether or not there are any.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        constants: list[str] = []

        def constant(text: str) -> float:
            constants.append(text)
            return float(text)

        value = json.loads(str(body, "utf-8"), parse_int=_integer, parse_float=_float, parse_constant=constant)
        if not constants:  # what only Python takes
            raise
        return value


def _integer(text: str) -> int | float:
    if len(text) < PLAIN_DIGITS:
        return int(text)
    number = _float(text)  # first, as Python makes no int of thousands of digits
    return exact if (exact := int(text)) in INTEGERS else number


def _float(text: str) -> float:
    """Raises ``OverflowError`` that shows a number which is too large."""
    number = float(text)
    if math.isinf(number):
        raise OverflowError(text if len(text) <= SHOWN_DIGITS else f"{text[:SHOWN_DIGITS]}…")
    return number


def _numbers(value: list[Any], elements: Iterable[Any], wanted: str, field: str) -> Array:
    strangers = {kind for kind in set(map(type, elements)) if kind not in (int, float)}
    if strangers:
        found = sorted({JSON_KINDS.get(stranger, "null") for stranger in strangers})
        raise RequestError(f"{wanted}, got {' and '.join(found)} among them", field)
    return np.array(value) if value else np.empty(0, np.int64)


def _is_ragged(value: list[Any]) -> bool:
    kinds = set(map(type, value))
    return list in kinds and (len(kinds) > 1 or len(set(map(len, value))) > 1)


def _shape(value: Any) -> list[int]:
    """The lengths of nested lists, by the first of each; rows are alike unless told otherwise."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < MOST_DIMENSIONS:
        shape.append(len(value))
        value = value[0] if value else None
    return shape
