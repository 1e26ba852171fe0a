"""Plans by measurement: the fastest of the smallest measured shape that holds the tokens, else the default."""

from typing import Any

import pytest
from benchmarks import plan_table

from moelet.graphs.geometry import Geometry
from moelet.graphs.plan_choice import DEFAULT_PLAN, Measured, choose, layer_key, measured
from moelet.graphs.program import Plan
from random_layers import SPEC

GEOMETRY = Geometry.of(SPEC, router_fp32=False, max_loras=2, max_lora_rank=16)
KEY = layer_key(SPEC)
FUSED_FIRST = {Plan.FUSED: 10.0, Plan.TWO_STREAM: 11.0}
TWO_FIRST = {Plan.FUSED: 12.0, Plan.TWO_STREAM: 11.0}
TABLE = [
    Measured("G", KEY, 1, FUSED_FIRST, "2030-01-01"),
    Measured("G", KEY, 16, TWO_FIRST, "2030-01-02"),
    Measured("other", KEY, 16, FUSED_FIRST, "2030-01-03"),
]


@pytest.mark.parametrize(
    ("tokens", "plan", "where"),
    [
        (1, Plan.FUSED, "at 1 "),
        (2, Plan.TWO_STREAM, "at 16 "),
        (16, Plan.TWO_STREAM, "at 16 "),
        (64, Plan.TWO_STREAM, "at 16 "),
    ],
)
def test_the_fastest_of_the_shape_that_holds_the_tokens(tokens: int, plan: Plan, where: str) -> None:
    choice = choose("G", GEOMETRY, tokens, TABLE)
    assert choice.plan is plan
    assert where in choice.why
    assert f"two_stream {11.0}" in choice.why


def test_what_was_not_measured_runs_the_default() -> None:
    for gpu, table in (("elsewhere", TABLE), ("G", [])):
        choice = choose(gpu, GEOMETRY, 16, table)
        assert choice.plan is DEFAULT_PLAN
        assert gpu in choice.why


def test_the_shipped_table_holds_plans_and_layers() -> None:
    for row in measured():
        assert len(row.us) > 1
        assert min(row.us.values()) > 0


def row(plan: str, us: float, **other: Any) -> dict[str, Any]:
    common = {
        "shape": "mixtral-8x7b",
        "tokens": 4,
        "routing": "uniform",
        "plan": plan,
        "us": us,
        "rank": 16,
        "adapters": 1,
    }
    return {**common, "layout": "per_expert", "wrong": False, **other}


def test_a_report_of_several_plans_is_compared() -> None:
    rows = [row(plan, us, adapters=n) for plan, us, n in (("fused", 10.0, 1), ("fused", 12.0, 4))]
    rows += [row("two_stream", 12.0), row("two_stream", 13.0, adapters=4)]
    more = [row("fused", 5.0, rank=0), row("fused", 1.0, wrong=True), row("fused", 1.0, layout="shared_outer")]
    report = {"kind": "layer", "rows": [*rows, *more, row("fused", 9.0, tokens=8)]}
    assert list(plan_table.compared(report)) == [("mixtral-8x7b", 4, {"fused": 11.0, "two_stream": 12.5})]
    # a run broken off, or with a wrong row, is compared as far as all plans go
    unequal = [row("fused", 300.0), row("fused", 400.0, adapters=4), row("two_stream", 330.0)]
    for end in ([], [row("two_stream", 410.0, adapters=4, wrong=True)]):
        report = {"kind": "layer", "rows": [*unequal, *end]}
        assert list(plan_table.compared(report)) == [("mixtral-8x7b", 4, {"fused": 300.0, "two_stream": 330.0})]
    assert list(plan_table.compared({"kind": "layer", "rows": unequal[1:]})) == []
    assert plan_table.written([{"a": 1}, {"b": 2}]) == '[\n{"a": 1},\n{"b": 2}\n]\n'
