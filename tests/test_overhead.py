"""The benchmark of the service's overhead: a short run of it, and what it makes of times."""

import json
from pathlib import Path

import pytest
from benchmarks import overhead
from benchmarks.tables import rewritten


def test_a_short_run_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "2026-01-01-overhead.json"
    arguments = ["--tokens", "1", "--rounds", "3", "--calls", "3", "--clients", "2"]
    assert overhead.main([*arguments, "--seconds", "0.05", "--commit", "abc", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["kind"], report["commit"]) == ("overhead", "abc")
    assert report["command"] == f"moelet bench overhead {' '.join(arguments)} --seconds 0.05"
    echo, service, echo_rate, service_rate = report["rows"]
    assert [row["server"] for row in report["rows"]] == ["echo", "service"] * 2
    assert [row["clients"] for row in report["rows"]] == [1, 1, 2, 2]
    assert (echo["calls"], service["calls"]) == (9, 9)
    assert 0 < echo["us"] <= echo["p90_us"]
    assert min(service["of_echo"], service_rate["of_echo"], echo_rate["calls_s"]) > 0
    assert "of_echo" not in echo
    assert len(capsys.readouterr().out.splitlines()) == 6

    region = "<!-- bench:start overhead-qwen3-30b-a3b -->\n<!-- bench:end -->"
    table = rewritten(region, tmp_path)
    assert f"| bare echo | {echo['us']:.0f} |" in table
    assert f"| – over the echo | {service['of_echo']:.2f} |" in table
    assert report["cpu"] in table


def test_ratios_are_those_of_the_rounds() -> None:
    """A machine that is ten times slower in one round leaves the ratio alone."""
    found = {
        "echo": [[10.0, 10, 10], [100, 100, 100], [10, 10, 10]],
        "service": [[15.0, 15, 15], [150, 150, 150], [15] * 3],
    }
    echo, service = overhead.latency_rows(4, found)
    assert (echo["us"], service["us"], service["of_echo"]) == (10, 15, 1.5)
    rates = {"echo": [100.0, 10.0, 100.0], "service": [50.0, 5.0, 50.0]}
    assert overhead.rate_rows(8, rates)[1]["of_echo"] == 0.5
