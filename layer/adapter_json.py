"""Reads JSON from files that nobody vouches for: UTF-8 only, every key once, finite numbers."""

import json
import reprlib
from typing import Any

from .errors import AdapterRefusedError

LONGEST_KEY = 4096


def parse_object(name: str, content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``, the bytes of the file ``name``.

    Raises ``AdapterRefusedError`` for a byte-order mark, another encoding, a key that comes twice, is
    not printable or longer than ``LONGEST_KEY``, for NaN and infinities, and for what is not an object.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterRefusedError(name, "a JSON object in UTF-8 without a byte-order mark", str(error)) from None
    if not isinstance(value, dict):
        raise AdapterRefusedError(name, "a JSON object", shown(value))
    return value


def shown(value: object) -> str:
    """``value`` for a message: short, and printable whatever it holds."""
    return reprlib.repr(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {shown(key)} twice")
        if len(key) > LONGEST_KEY or not key.isprintable():
            raise ValueError(f"the key {shown(key)}, which is no name")
        table[key] = value
    return table


def _no_constant(constant: str) -> None:
    raise ValueError(f"{constant}, which is not JSON")
