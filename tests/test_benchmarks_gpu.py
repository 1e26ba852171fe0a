"""The benchmarks of forwards on a real GPU, as they are called: with adapters and without, and right in every row."""

import importlib
import json
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver")

SHAPE = "--num-experts 8 --top-k 2 --hidden-size 256 --intermediate-size 128"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer", "kernels", "host"])
def test_a_benchmark_runs_with_adapters_and_without(tmp_path: Path, name: str) -> None:
    target = tmp_path / "result.json"
    chosen = f"{SHAPE} --ranks 0,8 --adapters 2 --slots 2 --tokens 3,17 --sets 2 --replays 3 --json {target}".split()
    chosen += ["--no-peers"] if name == "layer" else []
    code = importlib.import_module(f"benchmarks.{name}").main(chosen)
    assert code == 0
    rows = json.loads(target.read_text())["rows"]
    assert {(row["tokens"], row["rank"]) for row in rows} == set(product((3, 17), (0, 8)))
    if name == "layer":
        assert not any(row["wrong"] for row in rows)
        assert all(0 < row["error"] < 0.01 for row in rows)
