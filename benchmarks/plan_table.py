"""The table of plans that the engine ships, out of the newest results that measured several plans of a layer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from moelet.graphs import plan_choice
from moelet.graphs.program import Plan

from .newest import reports
from .report import RESULTS
from .shapes import SHAPES


def plan_table(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """One row for each GPU, layer and token count whose plans were measured side by side: of those with the most plans
    the newest, so that a run that was broken off among them replaces nothing."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for _, report in reports(folder):
        for shape, tokens, times in compared(report):
            layer = plan_choice.layer_key(SHAPES[shape])
            row = {
                "gpu": report["gpu"],
                "layer": list(layer),
                "tokens": tokens,
                "us": times,
                "date": report["date"][:10],
            }
            newer = found.setdefault((report["gpu"], shape, tokens), row)
            if len(newer["us"]) < len(times):
                found[report["gpu"], shape, tokens] = row
    return [found[key] for key in sorted(found)]


def compared(report: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(shape, tokens, µs by plan) of a report's uniform per-expert LoRA rows that have more than one plan: the mean
    over the ranks and adapters at which every one of these plans was measured, and right. None where none are. Plans
    that there are no more do not count."""
    known = {plan.value for plan in Plan}
    rows = [row for row in report["rows"] if report["kind"] == "layer" and row["rank"] and row["plan"] in known]
    rows = [row for row in rows if row["routing"] == "uniform" and row["layout"] == "per_expert"]
    for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in rows if row["shape"] in SHAPES):
        mine = [row for row in rows if (row["shape"], row["tokens"]) == (shape, tokens)]
        plans = dict.fromkeys(row["plan"] for row in mine)
        times: dict[tuple[int, int | str], dict[str, float]] = {}
        for row in mine:
            if not row["wrong"]:
                times.setdefault((row["rank"], row["adapters"]), {})[row["plan"]] = row["us"]
        whole = [each for each in times.values() if len(each) == len(plans)]
        if len(plans) > 1 and whole:
            yield shape, tokens, {plan: round(fmean(each[plan] for each in whole), 1) for plan in plans}


def written(table: list[dict[str, Any]]) -> str:
    """The file's text: a row a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n" if table else "[]\n"
