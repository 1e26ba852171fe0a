"""Results held against earlier ones, in the terms of each run: time over what its bytes take at its own bandwidth."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moelet.layer.errors import ConfigurationError

from . import report
from .report import Row

MOST_SLOWER = 1.03
WORKLOAD = ("shape", "tokens", "routing", "rank", "adapters", "layout", "slot_rank")
"""What makes two rows, of the same plan, the same measurement."""
BYTES, MOST_MORE_BYTES = ("weight_bytes", "lora_bytes"), 1.01
"""What those then read: much more, and they are of other layers or slots in spite of their names."""


class Comparison(NamedTuple):
    """A sentence for each row that is slower than before, how many were compared, and the names of the others."""

    slower: list[str]
    compared: int
    alone: list[str]


def read(path: Path) -> Row:
    """A report of ``moelet bench layer``. Raises ``ConfigurationError`` where there is none."""
    found = report.read(path)
    if not isinstance(found.get("rows"), list):
        raise ConfigurationError(f"{path} is no result of moelet bench: it has no rows")
    if found.get("kind") != "layer":
        raise ConfigurationError(f"{path} is of moelet bench {found.get('kind')}, not of layer")
    if not all(isinstance(row, dict) and _is_whole(row) for row in found["rows"]):
        raise ConfigurationError(f"{path} has a row that says nothing of its layer, plan or speed")
    return found


def _is_whole(row: Mapping[str, Any]) -> bool:
    fraction = row.get("fraction")
    named = all(isinstance(row.get(name), str) for name in ("shape", "plan", "routing"))
    return named and isinstance(fraction, int | float) and math.isfinite(fraction) and fraction >= 0


def workload(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is of, but for the plan."""
    return tuple(row.get(name) for name in WORKLOAD)


def compare(rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> Comparison:
    """Each of ``rows`` with the right row of ``earlier`` that has its workload and plan, or where both have one plan of
    it alone with that, whichever it is. Over 3 % more time than that is slower.

    ``fraction`` is floor over time, the floor being bytes over that run's bandwidth. Raises ``ConfigurationError``
    where no row is in both.
    """
    before: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in earlier:
        if row["fraction"] > 0 and not row.get("wrong"):
            before.setdefault(workload(row), {})[row["plan"]] = row
    plans = Counter(map(workload, rows))
    slower, alone = [], []
    for row in rows:
        by_plan = before.get(workload(row), {})
        one_plan = plans[workload(row)] == len(by_plan) == 1
        old = next(iter(by_plan.values())) if one_plan else by_plan.get(row["plan"])
        if old is None or not _same_bytes(row, old):
            alone.append(named(row))
        elif old["fraction"] > MOST_SLOWER * row["fraction"]:
            slower.append(
                f"{named(row)}: {row['fraction']:.1%} of the floor's speed, {old['fraction']:.1%} before"
                + (f" by {old['plan']}" if old["plan"] != row["plan"] else "")
                + (f" ({old['fraction'] / row['fraction'] - 1:+.1%} time)" if row["fraction"] else "")
            )
    if len(alone) == len(rows):
        raise ConfigurationError("the earlier result has none of the rows that were measured: nothing can be compared")
    return Comparison(slower, len(rows) - len(alone), alone)


def _same_bytes(row: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    pairs = [sorted((row.get(name, 0), old.get(name, 0))) for name in BYTES]
    return all(more <= MOST_MORE_BYTES * less for less, more in pairs)


def named(row: Mapping[str, Any]) -> str:
    """A row as a sentence names it."""
    lora = f", rank {row['rank']} x {row['adapters']} {row['layout']}" if row["rank"] else ", base"
    return f"{row['shape']} T={row['tokens']} {row['routing']}{lora}, {row['plan']}"
