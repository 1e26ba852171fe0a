"""The benchmark of hardware counters: what is profiled, and whole runs of it over a program in ncu's place."""

# ruff: noqa: ARG001 (the fake driver must be there)

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import counted, counters, ncu, report, tables
from benchmarks.__main__ import main
from benchmarks.forwards import Forwards

from bench_driver import BenchDriver, exact
from moelet.graphs.driver import driver
from moelet.layer.errors import ConfigurationError
from ncu_logs import ALL, MLP, READ, TO_SM, lines_of, log_of

NUMBERS = ["--num-experts", "16", "--top-k", "11", "--hidden-size", "72", "--intermediate-size", "40"]
SHAPE = "e16-k11-h72-i40"  # more experts a token than a token MLP is for
FEW = [*NUMBERS, "--tokens", "1,4", "--ranks", "0,8", "--adapters", "1,2", "--slots", "2", "--commit", "abc"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> BenchDriver:
    pytest.importorskip("cuda.bindings.driver")
    return BenchDriver().install(monkeypatch)


def manifest(folder: Path) -> dict[str, Any]:
    """What the profiled program leaves, run here over the fake driver."""
    path = folder / "manifest.json"
    assert counted.main([*FEW, "--only", SHAPE, "--manifest", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_one_replay_of_one_forward_is_profiled_for_each_setting(
    fake: BenchDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Forwards, "outputs", exact)
    settings = manifest(tmp_path)["settings"]
    told = [(s["setting"]["tokens"], s["setting"]["rank"], s["setting"]["adapters"]) for s in settings]
    assert told == [(1, 0, 0), (4, 0, 0), (1, 8, 1), (4, 8, 1), (4, 8, 2)]
    assert fake.profiled == [len(each["kernels"]) for each in settings]
    assert not fake.allocations, "the profiled program gives its memory back"
    for each in settings:
        assert 0.0 < each["setting"]["error"] < 0.01
        assert not each["setting"]["wrong"]
        assert [kernel["function"] for kernel in each["kernels"]] == ["narrow_sort", "expert_mlp", "finalize"]
        assert each["kernels"][1]["kernel_floor_bytes"] == each["setting"]["floor_bytes"]
        assert each["setting"]["floor_bytes"] == each["setting"]["weight_bytes"] + each["setting"]["lora_bytes"] > 0
        assert each["kernels"][0]["kernel_floor_bytes"] is None


def in_place_of_ncu(folder: Path, log: str, written: dict[str, Any], then: str = "") -> Path:
    """A program that answers as ncu does and leaves what it was called with, ``log`` and ``written``."""
    (folder / "log").write_text(log)
    (folder / "written").write_text(json.dumps(written))
    names = "\n".join(metric.split(".")[0] for metric in ALL.values() if metric != TO_SM)
    program = folder / "ncu"
    program.write_text(f"""#!{sys.executable}
import json, os, pathlib, shutil, sys
asked, here = sys.argv[1:], pathlib.Path({str(folder)!r})
if asked == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1) (public-release)")
elif asked[0] == "--query-metrics":
    print({names!r})
else:
    (here / "asked").write_text(json.dumps(asked))
    {then or "pass"}
    shutil.copy(here / "log", asked[asked.index("--log-file") + 1])
    shutil.copy(here / "written", asked[asked.index("--manifest") + 1])
""")
    program.chmod(0o755)
    return program


def log_for(written: dict[str, Any]) -> str:
    """A log with the kernels of ``written``, where each reads 1.5 times the floor of its forward."""
    kernels = [(each["setting"], kernel["function"]) for each in written["settings"] for kernel in each["kernels"]]
    parts = []
    for number, (setting, function) in enumerate(kernels):
        read = f"{3 * setting['floor_bytes'] // 2:,}" if function == "expert_mlp" else "0"
        parts.append(lines_of(number, function, MLP | {READ: ("byte", read)}))
    return log_of(*parts)


def test_a_run_becomes_rows_and_a_table(
    fake: BenchDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Forwards, "outputs", exact)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    written = manifest(tmp_path)
    program = in_place_of_ncu(tmp_path, log_for(written), written)
    assert main(["counters", *FEW, "--ncu", str(program), "--folder", str(tmp_path / "kept")]) == 0
    printed = capsys.readouterr().out
    assert printed.count(counters.FORWARD) == 5
    assert "1.500" in printed

    asked = json.loads((tmp_path / "asked").read_text())
    assert asked[asked.index("--profile-from-start") + 1] == "off"
    assert asked[asked.index("--metrics") + 1].split(",") == [metric for metric in ALL.values() if metric != TO_SM]
    assert asked[asked.index(sys.executable) :][:3] == [sys.executable, "-m", "benchmarks.counted"]
    assert asked[asked.index("benchmarks.counted") + 1 :][: len(FEW)] == FEW

    (path,) = (tmp_path / "results").glob("*.json")
    assert path.name.endswith(f"-counters-{SHAPE}.json")
    result = json.loads(path.read_text())
    assert (result["kind"], result["commit"], result["ncu"]) == ("counters", "abc", "2025.3.1.0")
    assert result["absent_counters"] == [TO_SM]
    assert str(tmp_path) not in result["command"]
    assert len(result["rows"]) == 15
    for row in result["rows"]:
        assert row["floor_us"] == pytest.approx(
            row["floor_bytes"] / result["read_bandwidth_tb_s"] * 1e-6, abs=0.01, rel=0.01
        )
        assert (row["shape"], row["grid"], row["to_sm_bytes"]) == (SHAPE, [132, 1, 1], None)
        assert row["dram_read_bytes"] == (3 * row["floor_bytes"] // 2 if row["kernel"] == "expert_mlp" else 0)

    lines = tables.content(f"counters-{SHAPE}", tmp_path / "results").splitlines()
    floors = {row["tokens"]: row["floor_bytes"] * 1e-6 for row in result["rows"] if row["rank"] == 0}
    assert lines[0] == "| MB (over the floor) | T=1 | T=4 |"
    assert f"| base, the floor | {floors[1]:.1f} | {floors[4]:.1f} |" in lines
    assert f"| base, read from DRAM | {1.5 * floors[1]:.1f} (1.500) | {1.5 * floors[4]:.1f} (1.500) |" in lines
    assert any(line.startswith("| LoRA r8 ×2, read from DRAM | – | ") for line in lines)
    assert next(line for line in lines if line.startswith("| – expert_mlp: ")).count("(89%)") == 2
    assert "moelet bench counters" in lines[-1]

    again = tmp_path / "again.json"
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,))
    reread = ["counters", *FEW, "--reread", "--folder", str(tmp_path / "kept"), "--json", str(again)]
    assert main(reread) == 0
    assert json.loads(again.read_text()) == result


def test_a_wrong_output_fails_the_run(fake: BenchDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = manifest(tmp_path)
    program = in_place_of_ncu(tmp_path, log_for(written), written)
    assert main(["counters", *FEW, "--ncu", str(program), "--json", str(tmp_path / "result.json")]) == 1
    assert capsys.readouterr().err.count("wrong output: ") == 5


@pytest.mark.parametrize(
    ("change", "then", "words"),
    [
        ("", "print('==ERROR== ERR_NVGPUCTRPERM - The user'); sys.exit(1)", ("ERR_NVGPUCTRPERM", "root")),
        ("", "sys.exit('moelet bench: it fell over')", ("it fell over",)),
        ("", "import time; time.sleep(60)", ("--limit-s 1",)),
        ("fewer", "", ("kernel 15 of 15 is finalize", "ncu saw None")),
        ("other", "", ("kernel 2 of 15 is expert_mlp", "ncu saw stranger")),
        ("empty", "", ("no table",)),
    ],
)
def test_a_run_that_fails_says_why_and_keeps_what_ncu_wrote(
    fake: BenchDriver,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    then: str,
    words: tuple[str, ...],
) -> None:
    written = manifest(tmp_path)
    log = log_for(written)
    if change == "fewer":
        log = "\n".join(line for line in log.splitlines() if not line.startswith('"14"'))
    if change == "other":
        log = log.replace("expert_mlp", "stranger", len(MLP))
    if change == "empty":
        log = "==PROF== Connected\n"
    program = in_place_of_ncu(tmp_path, log, written, then)
    arguments = ["counters", *FEW, "--ncu", str(program), "--folder", str(tmp_path / "kept"), "--limit-s", "1"]
    assert main([*arguments, "--json", str(tmp_path / "result.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert str(tmp_path / "kept") in error
    assert not (tmp_path / "result.json").exists()


def test_plans_of_two_streams_are_refused_by_the_profiled_program(fake: BenchDriver, tmp_path: Path) -> None:
    arguments = [*FEW, "--plan", "two_stream", "--only", SHAPE, "--manifest", str(tmp_path / "manifest.json")]
    with pytest.raises(ConfigurationError, match="single_stream"):
        counted.main(arguments)


def test_without_ncu_or_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "USUAL_PLACE", tmp_path / "absent")
    assert main(["counters", *NUMBERS]) == 2
    assert "Nsight Compute, is neither on PATH nor at" in capsys.readouterr().err
    assert main(["counters", *NUMBERS, "--ncu", str(tmp_path / "absent")]) == 2
    assert "is no program that can be run" in capsys.readouterr().err
    assert main(["counters", *NUMBERS, "--reread"]) == 2
    assert "--folder" in capsys.readouterr().err
    assert main(["counters", *NUMBERS, "--reread", "--folder", str(tmp_path / "empty")]) == 2
    assert "head.json is not what a run of counters leaves" in capsys.readouterr().err
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,), raising=False)
    program = in_place_of_ncu(tmp_path, "", {})
    assert main(["counters", *NUMBERS, "--ncu", str(program)]) == 2
    error = capsys.readouterr().err
    assert "no GPU can be used" in error
    assert error.count("\n") == 1
