"""The soak: a short one passes, and its truth tells any answer that is not right."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import soak
from benchmarks.soak_truth import ROWS, Truth

ADAPTERS = 5


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(tmp_path_factory.mktemp("truth"), ADAPTERS)


def test_a_short_soak_passes_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"seconds": 1.5, "clients": 12, "adapters": 8, "slots": 2, "changers": 2}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    code = soak.main([*options, "--commit=here", f"--json={tmp_path / 'soak.json'}"])
    assert code == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["kind"], report["commit"]) == ("soak", "here")
    under_load, quiet, swapping = report["rows"]
    assert [under_load["phase"], quiet["phase"], swapping["phase"]] == ["soak", "quiet", "swapping"]
    assert under_load["counts"]["forward 200"] > 0
    assert swapping["loads"] > quiet["loads"]
    for row in report["rows"]:
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["p999_ms"]


def test_only_the_right_answer_agrees(truth: Truth) -> None:
    for kind in truth.kinds:
        rows, variants = [0, 7, ROWS - 1, 20], [3, -1, 0, 4]
        right = truth.expected[kind][variants, rows]
        assert truth.agrees(kind, rows, variants, right)
        assert not truth.agrees(kind, rows, [3, 0, 0, 4], right)
        assert not truth.agrees(kind, [0, 7, ROWS - 1, 21], variants, right)
        one_bit = right.view(torch.int16).clone()
        one_bit[3, 5] ^= 1
        assert not truth.agrees(kind, rows, variants, one_bit.view(torch.bfloat16))
        assert right[2].isnan().any()
        assert not truth.agrees(kind, rows, variants, right.nan_to_num())


def test_an_engine_that_rounds_otherwise_is_held_to_float64(truth: Truth) -> None:
    kind = (0, True)
    right = truth.expected[kind]
    truth.adopt(kind, right)
    wrong = right.clone()
    wrong[2, 3] = right[1, 3]
    with pytest.raises(AssertionError):
        truth.adopt(kind, wrong)


def test_an_engine_that_rounds_otherwise_is_held_to_float64_before_it_is_believed(truth: Truth) -> None:
    for kind in truth.kinds:
        quiet = truth.expected[kind].clone()
        truth.adopt(kind, quiet)
        assert truth.expected[kind] is quiet
        wrong = quiet.clone()
        wrong[2, 5] = wrong[2, 6]
        with pytest.raises(AssertionError, match="Frobenius"):
            truth.adopt(kind, wrong)
        finite = quiet.nan_to_num()
        with pytest.raises(AssertionError, match="came out finite"):
            truth.adopt(kind, finite)
