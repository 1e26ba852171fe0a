"""Which of several results a table, a picture and the table of plans are made of: none that lacks what an older has."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import plan_table, plot, tables
from benchmarks.__main__ import main
from benchmarks.newest import newest

from bench_results import result, row
from moelet.layer.errors import ConfigurationError

REGION = "layer-qwen3-30b-a3b"
LORA = {"rank": 16, "adapters": 1, "layout": "per_expert"}
FOUR = LORA | {"adapters": 4}
FULL = [row(1), row(64), row(256), row(1, **LORA), row(64, **LORA), row(64, **FOUR)]
PEERS = [row(1, peer="torch grouped_mm"), row(64, peer="torch grouped_mm")]


def day(number: int) -> str:
    return f"2030-01-{number:02}T00:00:00+00:00"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A full result, and what was the whole of one the day before."""
    result(tmp_path, "first", day(1), FULL[:3], [])
    result(tmp_path, "full", day(2), FULL, PEERS)
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "peers", "lacking"),
    [
        (FULL[1:], PEERS, "base at T=1"),
        ([row(64), row(64, **LORA), row(64, **FOUR)], PEERS, "LoRA r16 ×1 at T=1; base at T=1,256"),
        (FULL[:5], PEERS, "LoRA r16 ×4 at T=64"),
        (FULL[:3], PEERS, "LoRA r16 ×1 at T=1,64; LoRA r16 ×4 at T=64"),
        ([row(2), row(128), *FULL[3:]], PEERS, "base at T=1,64,256"),
        ([*FULL[:5], row(64, **FOUR, wrong=True)], PEERS, "LoRA r16 ×4 at T=64"),
        ([*FULL[1:5], row(64, **FOUR | {"layout": "shared_outer"})], PEERS, "LoRA r16 ×4 at T=64; base at T=1"),
        (FULL, PEERS[:1], "torch grouped_mm at T=64"),
        (FULL, [], "torch grouped_mm at T=1,64"),
    ],
    ids=["tokens", "one", "adapters", "base", "others", "wrong", "layout", "peer", "peers"],
)
def test_a_newer_result_that_lacks_something_replaces_nothing(
    full: Path, rows: list[dict[str, Any]], peers: list[dict[str, Any]], lacking: str
) -> None:
    before = tables.content(REGION, full)
    result(full, "newer", day(3), rows, peers)
    assert tables.content(REGION, full) == before
    told = list(tables.passed_over(f"<!-- bench:start {REGION} -->\n<!-- bench:end -->\n", full))
    assert told == [f"{REGION}: newer.json is newer, but lacks what full.json has: {lacking}"]


@pytest.mark.parametrize("more", [[], [row(2)], [row(64, **LORA | {"adapters": "all"})]])
def test_a_newer_result_that_lacks_nothing_is_taken(full: Path, more: list[dict[str, Any]]) -> None:
    """Under whatever plan: the fastest is shown."""
    result(full, "newer", day(3), [*(each | {"plan": "fused"} for each in FULL), *more], PEERS)
    result(full, "part", day(4), FULL[:1], [])
    found = newest("layer", "qwen3-30b-a3b", folder=full)
    assert found is not None
    assert found.name == "newer.json"
    assert [sentence.split()[0] for sentence in found.passed_over] == ["part.json"]


def test_of_results_with_as_much_the_newest_is_the_fullest(full: Path) -> None:
    result(full, "other", day(3), [row(2), *FULL[1:]], PEERS)
    found = newest("layer", "qwen3-30b-a3b", folder=full)
    assert found is not None
    assert (found.name, found.passed_over) == ("other.json", [])


def test_a_result_that_a_mark_names_is_taken_however_little_it_has(full: Path) -> None:
    result(full, "part", day(3), [row(2, us=7.0)], [])
    text = f"<!-- bench:start {REGION} from part.json -->\n<!-- bench:end -->\n"
    once = tables.rewritten(text, full)
    assert once == tables.rewritten(once, full)
    first, heading, *_ = once.splitlines()
    assert (first, heading) == (text.splitlines()[0], "| µs (share of the floor) | T=2 |")
    assert "| base | 7.0 (90%) |" in once
    assert list(tables.passed_over(text, full)) == []
    for name in (f"{REGION} from absent.json", f"{REGION}-zipf from full.json", f"{REGION}-ranks from full.json"):
        with pytest.raises(ConfigurationError, match=name.split()[-1]):
            tables.rewritten(f"<!-- bench:start {name} -->\n<!-- bench:end -->\n", full)


def test_the_command_tells_what_it_passes_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once_for_each_region(text: str) -> list[str]:
        return ["one is newer"] * text.count(f"bench:start {REGION} -->")

    monkeypatch.setattr(tables, "passed_over", once_for_each_region)
    assert main(["tables", "--check"]) == 0
    assert capsys.readouterr().err == "one is newer\n", "two files have the region"


def test_hidden_states_of_older_results_were_in_pageable_memory(tmp_path: Path) -> None:
    times = {"graph_us": 270.0, "beside_graph_us": 70.0, "ahead_us": 300.0}

    def told() -> list[str]:
        region = "<!-- bench:start host-qwen3-30b-a3b -->\n<!-- bench:end -->\n"
        return [each.rpartition("lacks what ")[2] for each in tables.passed_over(region, tmp_path)]

    both = [row(tokens, memory=memory, **times) for tokens in (1, 64) for memory in ("pageable", "pinned")]
    result(tmp_path, "old", day(1), [row(1, **times), row(64, **times)], [], kind="host")
    result(tmp_path, "part", day(2), both[:1], [], kind="host")
    assert told() == ["old.json has: base, pageable at T=64"]
    result(tmp_path, "whole", day(3), both, [], kind="host")
    result(tmp_path, "pinned", day(4), both[1::2], [], kind="host")
    assert told() == ["whole.json has: base, pageable at T=1,64"]


def test_an_overhead_without_its_clients_replaces_nothing(tmp_path: Path) -> None:
    rows = [{"shape": "qwen3-30b-a3b", "tokens": 1, "clients": n, "server": "echo", "us": 1.0} for n in (1, 64)]
    result(tmp_path, "whole", day(1), rows, [], kind="overhead")
    result(tmp_path, "alone", day(2), rows[:1], [], kind="overhead")
    found = newest("overhead", "qwen3-30b-a3b", folder=tmp_path)
    assert found is not None
    assert found.name == "whole.json"
    assert found.passed_over[0].endswith("echo of 64 clients at T=1")


def test_pictures_are_of_the_same_results(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(plot, "newest", partial(newest, folder=full))
    monkeypatch.setattr(plot, "plot", lambda found, *_: drawn.append(found.name))
    result(full, "part", day(3), [row(2)], [])
    assert main(["plot", "--out", str(full)]) == 0
    assert "part.json is newer" in capsys.readouterr().err
    assert main(["plot", "--out", str(full), "--shape", "qwen3-30b-a3b", "--from", "part.json"]) == 0
    assert capsys.readouterr().err == ""
    assert drawn == ["full.json", "part.json"]
    assert main(["plot", "--out", str(full), "--from", "part.json"]) == 2
    assert "--shape" in capsys.readouterr().err


def test_fewer_plans_replace_no_row_of_the_table_of_plans(tmp_path: Path) -> None:
    """As a run that was broken off has; plans that there are no more are nothing to wait for."""

    def measured(name: str, number: int, plans: list[str]) -> list[dict[str, Any]]:
        result(tmp_path, name, day(number), [row(plan=plan, us=float(number), **LORA) for plan in plans], [])
        return [each["us"] for each in plan_table.plan_table(tmp_path)]

    assert measured("gone", 1, ["fused", "single_stream", "two_stream", "gone"]) == [
        dict.fromkeys(("fused", "single_stream", "two_stream"), 1.0)
    ]
    assert measured("whole", 2, ["fused", "single_stream", "two_stream"]) == [
        dict.fromkeys(("fused", "single_stream", "two_stream"), 2.0)
    ]
    assert measured("part", 3, ["fused", "single_stream"]) == [
        dict.fromkeys(("fused", "single_stream", "two_stream"), 2.0)
    ]
