"""Valid data made wrong: JSON and bytes with a few places changed, and a bound on the memory that reading it takes."""

import copy
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.5, 1e308, 1e-320])
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=4) | st.just("\ud800")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within ``value``."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        for key in list(keys):
            found += [(value, key), *places(value[key])]
    return found


@st.composite
def changed_json(draw: st.DrawFn, value: Any, words: tuple[str, ...] = ()) -> Any:
    """``value`` with one to three of its parts replaced, dropped, doubled, or swapped for one of another place."""
    value = copy.deepcopy(value)
    known = st.sampled_from(words) if words else st.nothing()
    for _ in range(draw(st.integers(1, 3))):
        everywhere = places(value)
        if not everywhere:
            return draw(VALUES)
        owner, key = draw(st.sampled_from(everywhere))
        match draw(st.sampled_from(["replace", "drop", "double", "swap", "number"])):
            case "replace":
                owner[key] = draw(VALUES | known)
            case "number" if isinstance(owner[key], int):
                owner[key] += draw(st.integers(-3, 3))
            case "drop":
                del owner[key]
            case "double" if isinstance(owner, list):
                owner.insert(key, copy.deepcopy(owner[key]))
            case "double":
                owner[draw(st.text(max_size=3) | known)] = copy.deepcopy(owner[key])
            case _:
                other, place = draw(st.sampled_from(everywhere))
                owner[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with a few places overwritten, cut out, repeated, or cut off."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(changed)))
        stop = min(len(changed), start + draw(st.integers(0, 9)))
        match draw(st.sampled_from(["overwrite", "cut", "repeat", "end"])):
            case "overwrite":
                new = draw(st.binary(min_size=1, max_size=9))
                changed[start : start + len(new)] = new
            case "cut":
                del changed[start:stop]
            case "repeat":
                changed[start:start] = changed[start:stop]
            case "end":
                del changed[start:]
    return bytes(changed)


@contextmanager
def little_memory(given: int) -> Iterator[None]:
    """Fails when what happens inside takes, beyond a constant, more than a small multiple of the bytes ``given``."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * given + (1 << 20), f"{peak} bytes were taken for {given}"
