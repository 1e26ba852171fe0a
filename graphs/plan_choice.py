"""Which plan a captured shape with adapters runs under: the fastest where it was measured, else the one that mostly is.

``plan_table.json`` beside this file has the measurements, by GPU and layer; ``moelet bench tables`` writes it from the
results of ``moelet bench layer --plan all``. A table is steadier than measuring at start-up: the same service chooses
the same plans each time, and starts no later for it. No plan changes a bit of the output.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..layer.spec import LayerSpec
from .geometry import Geometry
from .program import Plan

TABLE = Path(__file__).with_name("plan_table.json")
DEFAULT_PLAN = Plan.FUSED
"""Where nothing was measured."""

LayerKey = tuple[int, int, int, int, int]
"""Experts of the layer, experts held, top_k, hidden size and intermediate size."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and why it, for people."""

    plan: Plan
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer's times at ``tokens`` on one GPU: µs by plan, the mean over the ranks and adapter counts
    that were measured."""

    gpu: str
    layer: LayerKey
    tokens: int
    us: Mapping[Plan, float]
    date: str


def layer_key(layer: Geometry | LayerSpec) -> LayerKey:
    """What tells one layer's measurements from another's."""
    return layer.num_experts, layer.num_local_experts, layer.top_k, layer.hidden_size, layer.intermediate_size


def choose(gpu: str, geometry: Geometry, tokens: int, table: Sequence[Measured] | None = None) -> Choice:
    """The plan of ``tokens`` tokens on ``gpu``: that of the smallest measured shape that holds them."""
    key = layer_key(geometry)
    rows = [row for row in (measured() if table is None else table) if (row.gpu, row.layer) == (gpu, key)]
    if not rows:
        return Choice(DEFAULT_PLAN, f"the default: this layer was not measured on {gpu}")
    row = min(rows, key=lambda row: (row.tokens < tokens, abs(row.tokens - tokens)))
    best = min(row.us, key=lambda plan: row.us[plan])
    times = ", ".join(f"{plan.value} {us:.1f}" for plan, us in sorted(row.us.items(), key=lambda item: item[1]))
    return Choice(best, f"the fastest of this layer at {row.tokens} tokens, {row.date}, in µs: {times}")


@cache
def measured() -> tuple[Measured, ...]:
    """The shipped table."""
    return tuple(
        Measured(
            row["gpu"],
            tuple(row["layer"]),
            row["tokens"],
            {Plan(name): us for name, us in row["us"].items()},
            row["date"],
        )
        for row in json.loads(TABLE.read_text(encoding="utf-8"))
    )
