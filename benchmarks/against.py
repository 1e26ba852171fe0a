"""Results held against earlier ones, in the terms of each run: time over what its bytes take at its own bandwidth."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moelet.layer.errors import ConfigurationError

MOST_SLOWER = 1.03
KEY = ("shape", "tokens", "plan", "routing", "rank", "adapters", "layout", "slot_rank")
"""What makes two rows the same measurement."""


def read(path: Path) -> dict[str, Any]:
    """A report. Raises ``ConfigurationError`` where there is none."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no result that can be read: {error}") from error
    if not isinstance(report, dict) or not isinstance(report.get("rows"), list):
        raise ConfigurationError(f"{path} is no result of moelet bench: it has no rows")
    return report


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The measurement that a row is of."""
    return tuple(row.get(name) for name in KEY)


def slower(rows: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each of ``rows`` that is over 3 % slower than the same row of ``earlier``.

    ``fraction`` is floor over time, the floor being bytes over that run's bandwidth. Raises ``ConfigurationError``
    where no row is in both.
    """
    before = {key(row): row for row in earlier}
    pairs = [(row, before[key(row)]) for row in rows if key(row) in before]
    if not pairs:
        raise ConfigurationError("the earlier result has none of the rows that were measured: nothing can be compared")
    return [
        f"{named(row)}: {row['fraction']:.1%} of the floor's speed, {old['fraction']:.1%} before "
        f"({old['fraction'] / row['fraction'] - 1:+.1%} time)"
        for row, old in pairs
        if old["fraction"] > MOST_SLOWER * row["fraction"]
    ]


def named(row: Mapping[str, Any]) -> str:
    """A row as a sentence names it."""
    lora = f", rank {row['rank']} x {row['adapters']} {row['layout']}" if row["rank"] else ", base"
    return f"{row['shape']} T={row['tokens']} {row['routing']}{lora}, {row['plan']}"
