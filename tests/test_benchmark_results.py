"""What becomes of measured rows: times, comparisons, files, tables and pictures."""

import json
import math
from pathlib import Path

import pytest
from benchmarks import against, report, shapes, tables
from benchmarks.newest import best_published, newest, published
from benchmarks.timing import Timing

from bench_results import result, row
from moelet.layer.errors import ConfigurationError


def test_times() -> None:
    timing = Timing.of([float(i) for i in range(1, 12)])
    assert timing == Timing(6.0, 2.0, 10.0)
    assert timing.row() == {"us": 6.0, "p10_us": 2.0, "p90_us": 10.0}


def test_only_what_is_over_three_percent_slower_is_told() -> None:
    earlier = [row(1, 0.60), row(16, 0.80), row(64, 0.90), row(64, 0.85, plan="two_stream"), row(256, 0.9)]
    now = [row(1, 0.60 / 1.029), row(16, 0.80 / 1.031), row(64, 0.95), row(64, 0.5, plan="two_stream", rank=8)]
    (sentence,), compared, (alone,) = against.compare(now, earlier)
    assert "T=16 " in sentence
    assert "+3.1% time" in sentence
    assert (compared, "two_stream" in alone) == (3, True)
    # a memory that is slower for both is no slower layer: time and floor grow alike
    assert against.compare([row(us=560.0, floor_us=504.0)], [row()]).slower == []
    for nothing in ([row(2)], [row(1, wrong=True)], [row(1, 0.0)], [row(1, weight_bytes=115, lora_bytes=0)]):
        with pytest.raises(ConfigurationError, match="nothing can be compared"):
            against.compare([row(1, weight_bytes=98, lora_bytes=0)], nothing)


def test_a_plan_chosen_anew_is_compared_with_the_one_before() -> None:
    earlier = [row(plan="fused")]
    (sentence,), _, _ = against.compare([row(fraction=0.09)], earlier)
    assert "single_stream: 9.0% of the floor's speed, 90.0% before by fused" in sentence
    # but not where there is a choice of which it might be
    assert against.compare([row(), row(plan="two_stream")], [*earlier, row()]).alone == [
        "qwen3-30b-a3b T=64 uniform, base, two_stream"
    ]
    assert against.compare([row(fraction=0.0)], [row()]).slower


def test_what_is_no_result_is_said(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    whole = {"shape": "a", "plan": "fused", "routing": "uniform"}
    rows = [1, {}, {**whole, "fraction": "0.9"}, {**whole, "fraction": math.nan}, {**whole, "fraction": None}]
    broken = [json.dumps({"kind": "layer", "rows": [each]}) for each in rows]
    for text in ("{", "[]", "{}", '{"rows": 3}', '{"kind": "host", "rows": []}', *broken, "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"result\.json"):
            against.read(path)
    with pytest.raises(ConfigurationError, match="absent"):
        against.read(tmp_path / "absent")


def test_results_are_written_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    head = {"kind": "layer", "date": "2030-01-02T03:04:05+00:00"}
    each = report.Results(head, None)
    for shape in ("one", "two"):
        each.start(shape)
        each.add(row(1, shape=shape))
        each.add(row(2, shape=shape, wrong=True))
        each.add(row(1, shape=shape, peer="other"))
        written = json.loads((tmp_path / f"2030-01-02-layer-{shape}.json").read_text())
        assert [r["tokens"] for r in written["rows"]] == [1, 2]
        assert [r["peer"] for r in written["peers"]] == ["other"]
    assert [(r["shape"], r["tokens"]) for r in each.wrong] == [("one", 2), ("two", 2)]
    for number in (2, 3):  # the same again, the same day: what is there stays
        again = report.Results(head, None)
        again.start("two")
        again.add(row(number))
        assert json.loads((tmp_path / f"2030-01-02-layer-two-{number}.json").read_text())["rows"] == [row(number)]
    assert json.loads((tmp_path / "2030-01-02-layer-two.json").read_text()) == written
    both = report.Results(head, tmp_path / "deep" / "both.json")
    for shape in ("one", "two"):
        both.start(shape)
        both.add(row(shape=shape))
    assert [r["shape"] for r in json.loads((tmp_path / "deep" / "both.json").read_text())["rows"]] == ["one", "two"]
    with pytest.raises(ValueError, match="JSON"):
        both.add(row(error=math.nan))
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == [
        "2030-01-02-layer-one.json",
        "2030-01-02-layer-two-2.json",
        "2030-01-02-layer-two-3.json",
        "2030-01-02-layer-two.json",
        "both.json",
    ]


def test_runs_that_began_together_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    head = {"kind": "layer", "date": "2030-01-02T03:04:05+00:00"}
    both = [report.Results(head, None) for _ in range(2)]
    for each in both:
        each.start("one")
    for tokens, each in enumerate(both, 1):
        each.add(row(tokens))
    written = [json.loads(path.read_text())["rows"] for path in sorted((tmp_path / "results").iterdir())]
    assert sorted(rows[0]["tokens"] for rows in written) == [1, 2]


def test_a_command_is_told_without_what_only_its_place_and_commit_were() -> None:
    given = [
        "--tokens",
        "1,4",
        "--commit",
        "abc",
        "--json=x",
        "--folder",
        "y",
        "--json",
        "a",
        "--json",
        "b",
        "--no-check",
    ]
    given += ["--against", "z"]
    assert report.measuring(given) == ["--tokens", "1,4", "--no-check"]


def test_a_table_on_the_terminal_is_short_and_straight() -> None:
    table = report.Table("T:5 plan:8 us:7")
    assert table.heading == "    T      plan       us"
    assert table.line([64, None, report.fixed(3.14159)]) == "   64         -      3.1"
    assert report.fixed(None) is None
    assert (report.rounded(0.0051234, 3), report.rounded(math.nan)) == (0.00512, None)


def test_published_peers_are_those_of_the_day() -> None:
    best = best_published("qwen3-30b-a3b", 0, 0)
    assert [(best[t].name, best[t].us[t]) for t in (1, 8192)] == [
        ("vLLM Triton, as shipped", 30.2),
        ("DeepGEMM", 1338.0),
    ]
    lora = best_published("qwen3-30b-a3b", 16, 4)
    assert 1 not in lora
    assert (lora[64].name, lora[64].us[64]) == ("SGLang LoRA, plan runner", 322.3)
    assert best_published("mixtral-8x7b", 0, 0)[256].us[256] == 750.0
    assert best_published("qwen3-30b-a3b-ep4", 0, 0)[64].us[64] == 94.2
    assert best_published("qwen3.5-35b-a3b", 16, 1)[256].us[256] == 430.5
    assert all(peer.us for shape in shapes.SHAPES for peer in published(shape))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """An old result, a newer one, newer ones still of fewer tokens the same day, of another routing and of several
    ranks, one of another program."""
    lora = {"rank": 16, "adapters": 1, "layout": "per_expert", "of_base": 1.04, "fraction": 0.88}
    slow = lora | {"plan": "two_stream", "us": 300.0}
    wrong = lora | {"tokens": 16, "us": 1.0, "wrong": True}
    other = {"shape": "qwen3-30b-a3b", "routing": "uniform", "tokens": 64, "peer": "torch grouped_mm"}
    timed = {"us": 472.0, "fraction": 0.54, "of_base": None, "floor_us": 252.0, "wrong": False}
    result(tmp_path, "old", "2030-01-01T00:00:00+00:00", [row(us=999.0)], [])
    rows = [row(1, 0.7, us=24.0, floor_us=16.4), row(), row(**lora, us=291.2), row(**slow), row(**wrong)]
    result(tmp_path, "new", "2030-01-02T00:00:00+00:00", rows, [other | timed])
    result(tmp_path, "fewer", "2030-01-02T01:00:00+00:00", [row(us=888.0)], [])
    result(tmp_path, "zipf", "2030-01-03T00:00:00+00:00", [row(us=111.0, routing="zipf")], [])
    ranks = [row(us=500.0), row(**lora | {"rank": 8}, us=222.0), row(**lora | {"rank": 64}, us=333.0)]
    result(tmp_path, "ranks", "2030-01-04T00:00:00+00:00", ranks, [])
    (tmp_path / "other.json").write_text('{"date": "2031-01-01", "rows": [{"tokens": 1}]}')
    return tmp_path


def test_tables_hold_the_newest_right_results(results: Path) -> None:
    text = "before\n<!-- bench:start layer-qwen3-30b-a3b -->\nstale\n<!-- bench:end -->\nafter\n"
    once = tables.rewritten(text, results)
    assert once == tables.rewritten(once, results)
    assert once.startswith(
        "before\n<!-- bench:start layer-qwen3-30b-a3b -->\n| µs (share of the floor) | T=1 | T=64 |\n"
    )
    assert once.endswith("<!-- bench:end -->\nafter\n")
    lines = once.splitlines()
    for line in (
        "| base | 24.0 (70%) | 280.0 (90%) |",
        "| floor | 16.4 | 252.0 |",
        "| its arithmetic at 785 TFLOP/s | 0.1 | 6.2 |",
        "| LoRA r16 ×1 | – | 291.2 (88%) |",
        "| – over base | – | 1.040 |",
        "| torch grouped_mm, base, same run | – | 472.0 (54%) |",
        "| best peer, base, 2026-11-29 | 30.2 | 296.4 |",
        "| best peer, LoRA r16 ×1, 2026-11-29 | 36.8 | 311.3 |",
        "2030-01-02, NVIDIA H200 at 1980 MHz, driver 580, read bandwidth 4.59 TB/s, commit 0123456789ab: "
        "`moelet bench layer new`",
    ):
        assert line in lines
    assert not any("300.0" in line or "999.0" in line or "888.0" in line or "111.0" in line for line in lines)
    assert "111.0" in tables.content("layer-qwen3-30b-a3b-zipf", results)
    several = tables.content("layer-qwen3-30b-a3b-ranks", results)
    assert all(us in several for us in ("500.0", "222.0", "333.0"))
    assert "291.2" not in several
    assert tables.content("layer-mixtral-8x7b", results) == tables.NO_RESULT
    assert tables.content("layer-e60-k4-h2048-i1408", results) == tables.NO_RESULT
    for wrong in ("shape-x", "layer-mixtral-8x7", "layer-e60-k4"):
        with pytest.raises(ConfigurationError, match=wrong):
            tables.content(wrong, results)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- bench:start layer-mixtral-8x7b -->\nprose\n<!-- bench:start host-mixtral-8x7b -->\n<!-- bench:end -->\n",
        "<!-- bench:start layer-mixtral-8x7b -->\n<!-- bench:end -->\n<!-- bench:start host-mixtral-8x7b -->\n",
        "<!-- bench:start  layer-mixtral-8x7b -->\n<!-- bench:end -->\n",
    ],
)
def test_marks_without_a_partner_are_said(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="marks of regions"):
        tables.rewritten(text, tmp_path)


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for text in ("{", "3", "null"):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"broken\.json"):
            newest("layer", "mixtral-8x7b", folder=tmp_path)


def test_tables_of_the_host_path_tell_where_hidden_states_were(tmp_path: Path) -> None:
    """Where a result says so: older ones do not, and are tables as they were."""
    times = {"graph_us": 270.0, "beside_graph_us": 70.0, "ahead_us": 300.0}
    made = [row(us=340.0, memory="pageable", **times), row(us=320.0, memory="pinned", **times)]
    lora = row(us=330.0, memory="pinned", **times | {"rank": 16, "adapters": 1})  # the run was broken off
    old = [{name: value for name, value in made[0].items() if name != "memory"}]
    for name, rows, firsts in (
        ("old", old, ["| host to host, base | 340.0 |"]),
        ("new", made, ["| host to host, base, pageable | 340.0 |", "| host to host, base, pinned | 320.0 |"]),
        (
            "newer",
            [made[1], made[0], lora],
            [
                "| host to host, base, pinned | 320.0 |",
                "| host to host, base, pageable | 340.0 |",
                "| host to host, LoRA r16 ×1, pinned | 330.0 |",
            ],
        ),
    ):
        result(tmp_path, name, f"2030-01-0{len(firsts)}T00:00:00+00:00", rows, [], kind="host")
        lines = tables.content("host-qwen3-30b-a3b", tmp_path).splitlines()
        assert [line for line in lines if line.startswith("| host to host")] == firsts
        assert sum("(90%)" in line for line in lines) == len(firsts)


@pytest.mark.parametrize("there", range(1, 4))
def test_tables_of_the_overhead_have_what_was_measured_before_a_run_was_broken_off(tmp_path: Path, there: int) -> None:
    rows = [
        {"shape": "qwen3-30b-a3b", "tokens": tokens, "clients": 1, "server": server, "us": 100.0, "of_echo": 0.5}
        for tokens, server in ((1, "echo"), (1, "service"), (64, "echo"))
    ]
    result(tmp_path, "part", "2030-01-01T00:00:00+00:00", rows[:there], [], kind="overhead")
    lines = tables.content("overhead-qwen3-30b-a3b", tmp_path).splitlines()
    first = "0.50" if there > 1 else "–"
    assert f"| – over the echo | {first}{' | –' * (there == 3)} |" in lines
    assert f"| bare echo | 100{' | 100' * (there == 3)} |" in lines


def test_the_tables_in_the_repository_are_those_of_its_results() -> None:
    assert tables.stale() == {}


def test_a_picture_is_drawn(results: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot

    found = newest("layer", "qwen3-30b-a3b", folder=results)
    assert found is not None
    plot(found, "qwen3-30b-a3b", results / "drawn" / "layer.png")
    assert (results / "drawn" / "layer.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
