"""What a result says of its run: which GPU it was, and whether a layer had its shared experts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import options, peers, report, shapes, tables
from benchmarks.__main__ import main
from benchmarks.newest import newest

from bench_driver import BenchDriver
from bench_results import result, row
from random_layers import SHARED_SPEC, SPEC

pytest.importorskip("cuda.bindings.driver")

SMALL = ["--ranks", "0", "--tokens", "2", "--replays", "5", "--no-check", "--commit", "abc"]
CLOCKS = {"0000:5B:00.0": "580.1, 1111 MHz, 2 MHz, 3 MHz, 4 W, 5 W", "0000:5C:00.0": "580.1, 2222 MHz"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> BenchDriver:
    for name, spec in (("small", SHARED_SPEC), ("plain", SPEC), ("second", SHARED_SPEC.expert_slice(3, 3))):
        monkeypatch.setitem(shapes.SHAPES, name, spec)
    return BenchDriver().install(monkeypatch)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that knows its GPUs by where they are, and by ordinals that are not the driver's."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    known = CLOCKS | {"0": "580.1, 3333 MHz", "1": "580.1, 4444 MHz"}
    program.write_text(f"""#!{sys.executable}
import sys
(asked,) = [argument[5:] for argument in sys.argv if argument.startswith("--id=")]
print({known!r}.get(asked) or sys.exit("No devices were found"))
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


@pytest.mark.parametrize(("gpu", "clock"), [("0", "1111 MHz"), ("1", "2222 MHz"), ("2", None)])
@pytest.mark.usefixtures("smi")
def test_clocks_are_those_of_the_gpu_that_is_measured(
    fake: BenchDriver, tmp_path: Path, gpu: str, clock: str | None
) -> None:
    """It is known by where it is: CUDA_VISIBLE_DEVICES gives it another ordinal than nvidia-smi's."""
    fake.device_count = 3
    path = tmp_path / "result.json"
    assert main(["layer", "--shape", "plain", *SMALL, "--gpu", gpu, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert (written.get("sm_clock"), written.get("driver")) == (clock, "580.1" if clock else None)


def run(results: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the one file that a run of ``layer`` leaves in ``results``."""
    before = set(results.glob("*"))
    code = main(["layer", *SMALL, *arguments])
    (path,) = set(results.glob("*")) - before
    return code, {"file": path.name, **json.loads(path.read_text())}


@pytest.mark.usefixtures("fake")
def test_layers_with_their_shared_experts_have_a_name_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    _, without = run(tmp_path, "--shape", "small")
    assert tables.content("layer-small-shared", tmp_path) == tables.NO_RESULT
    _, whole = run(tmp_path, "--shape", "small", "--shared")
    assert [each["shape"] for each in (*without["rows"], *whole["rows"])] == ["small", "small-shared"]
    assert [each["file"].partition("-layer-")[2] for each in (without, whole)] == ["small.json", "small-shared.json"]
    assert whole["rows"][0]["weight_bytes"] > without["rows"][0]["weight_bytes"]
    assert "\nsmall-shared\n" in capsys.readouterr().out
    for name in ("small", "small-shared"):
        found = newest("layer", name, folder=tmp_path)
        assert found is not None
        assert found.name.endswith(f"-{name}.json")
    # neither is compared with the other
    place = str(tmp_path / whole["file"])
    assert run(tmp_path, "--shape", "small", "--against", place)[0] == 2
    assert "nothing can be compared" in capsys.readouterr().err
    assert run(tmp_path, "--shape", "small", "--shared", "--against", place)[0] == 0


@pytest.mark.usefixtures("fake")
def test_older_results_with_shared_experts_are_read_by_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    _, old = run(tmp_path, "--shape", "small", "--shared")
    (tmp_path / old.pop("file")).unlink()
    for each in old["rows"]:
        each["shape"] = "small"
    peer = {**old["rows"][0], "peer": "other"}
    result(tmp_path, "older", "2030-01-01", [row(us=1.0, shape="small")], [])
    report.write(tmp_path / "old.json", {**old, "peers": [peer]})
    found, other = newest("layer", "small-shared", folder=tmp_path), newest("layer", "small", folder=tmp_path)
    assert found is not None
    assert other is not None
    assert (found.name, other.name, len(found.peers)) == ("old.json", "older.json", 1)
    assert run(tmp_path, "--shape", "small", "--shared", "--against", str(tmp_path / "old.json"))[0] == 0


@pytest.mark.usefixtures("fake")
def test_layers_that_compute_no_shared_experts_keep_their_name() -> None:
    parser = options.Parser()
    options.shape_options(parser)
    asked = [part for name in ("small", "plain", "second") for part in ("--shape", name)]
    chosen = options.chosen_shapes(parser.parse_args([*asked, "--shared"]))
    assert list(chosen) == ["small-shared", "plain", "second"]
    assert chosen["small-shared"] == shapes.called("small-shared") == SHARED_SPEC
    assert [shapes.called(name) for name in ("plain-shared", "second-shared", "-shared")] == [None] * 3
    assert {"small", "small-shared", "plain"} <= set(shapes.names())
    assert not {"plain-shared", "second-shared"} & set(shapes.names())
    (default,) = options.chosen_shapes(parser.parse_args(["--shared"]))
    assert default == shapes.DEFAULT_SHAPE, "it has none"


def test_peers_that_have_no_shared_experts_are_not_timed_for_a_layer_that_has() -> None:
    found, absent = peers.importable(SHARED_SPEC, torch.device("cuda"))
    assert (found, set(absent.values())) == ({}, {"it has no shared experts"})
    assert "torch grouped_mm" in peers.importable(SPEC, torch.device("cuda"))[0]
