"""``rank_pattern`` and ``alpha_pattern``: which entry applies to a module's name, as PEFT decides it."""

import math
import re
import time
from collections.abc import Mapping
from typing import Generic, TypeVar

from .adapter_json import shown
from .errors import AdapterRefusedError

T = TypeVar("T")

MOST_EXPRESSIONS = 256
MOST_STEPS_LOG2 = 24
MOST_SECONDS = 5.0
"""Of processor time that all names of one adapter may take to be looked up in one table."""

_PLAIN = re.compile(r"[\w.-]+")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"(?<![\\(])[*+{?][?+]?")


class Patterns(Generic[T]):
    """Values by pattern: the first KEY for which ``^(.*\\.)?(KEY)$`` matches a name gives its value.

    That is PEFT's rule (``peft.utils.other.get_pattern_key``). Plain keys, of which there may be one
    for every expert, are looked up and not tried in turn; a dot in them stands for any character, as in
    PEFT. Raises ``AdapterRefusedError`` for a key that is no regular expression, or one on which
    matching could take for ever.

    Every match is short, but an adapter has thousands of names, and its reader other adapters to read. So what all of
    them take is bounded too: see ``find``.
    """

    def __init__(self, field: str, table: Mapping[str, T]) -> None:
        self._field = field
        self._seconds = 0.0
        self._found: dict[str, T | None] = {}
        self._plain: dict[tuple[int, ...], dict[str, tuple[int, T]]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], T]] = []
        for order, (key, value) in enumerate(table.items()):
            if _PLAIN.fullmatch(key):
                shape = (len(key), *(place for place, letter in enumerate(key) if letter == "."))
                self._plain.setdefault(shape, {}).setdefault(_letters(key, shape), (order, value))
            else:
                self._expressions.append((order, _compiled(field, key), value))
        if len(self._expressions) > MOST_EXPRESSIONS:
            raise AdapterRefusedError(
                field, f"at most {MOST_EXPRESSIONS} regular expressions", f"{len(self._expressions)}"
            )

    def find(self, name: str) -> T | None:
        """The value for the module ``name``, without the ``base_model.model.`` of a tensor's key.

        Raises ``AdapterRefusedError`` once all look-ups together have taken ``MOST_SECONDS`` of this thread.
        """
        if name not in self._found:
            start = time.thread_time()
            self._found[name] = self._first(name)
            self._seconds += time.thread_time() - start
        if self._seconds > MOST_SECONDS:
            looked_up = f"{len(self._found)} modules were in that time"
            raise AdapterRefusedError(
                self._field, f"patterns in which all modules are looked up within {MOST_SECONDS:g} s", looked_up
            )
        return self._found[name]

    def _first(self, name: str) -> T | None:
        hits = [hit for shape, keys in self._plain.items() if (hit := _look_up(keys, name, shape))]
        hits += [(order, value) for order, pattern, value in self._expressions if pattern.match(name)]
        return min(hits, key=lambda hit: hit[0])[1] if hits else None


def _letters(text: str, shape: tuple[int, ...]) -> str:
    """``text`` without what stands where a key of ``shape`` has its dots."""
    dots = set(shape[1:])
    return "".join(letter for place, letter in enumerate(text) if place not in dots)


def _look_up(keys: Mapping[str, tuple[int, T]], name: str, shape: tuple[int, ...]) -> tuple[int, T] | None:
    start = len(name) - shape[0]
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return None
    return keys.get(_letters(name[start:], shape))


def _compiled(field: str, key: str) -> re.Pattern[str]:
    if _REPEATED_GROUP.search(key) or _steps_log2(key) > MOST_STEPS_LOG2:
        raise AdapterRefusedError(field, "regular expressions of at most four repeats, none of a group", shown(key))
    try:
        return re.compile(rf"^(.*\.)?({key})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterRefusedError(field, "regular expressions", f"{shown(key)}: {error}") from None


def _steps_log2(key: str) -> float:
    """A bound on the work of matching: every repeat may take up to 64 letters, every group any alternative.

    A match holds the interpreter, so one that takes for ever would stop the whole service.
    """
    groups = key.count("(") + 1
    return 6 * len(_REPEAT.findall(key)) + groups * math.log2(key.count("|") / groups + 1)
