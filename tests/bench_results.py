"""Rows and results of benchmarks written by hand, for tests of what becomes of them."""

from pathlib import Path
from typing import Any

from benchmarks import report


def row(tokens: int = 64, fraction: float = 0.9, **other: Any) -> dict[str, Any]:
    """A right row of the base layer of Qwen3-30B-A3B, but for what is ``other``."""
    common = {"shape": "qwen3-30b-a3b", "routing": "uniform", "plan": "single_stream", "rank": 0, "adapters": 0}
    costs = {"layout": None, "slot_rank": 16, "us": 280.0, "floor_us": 252.0, "of_base": None, "wrong": False}
    return common | costs | {"tokens": tokens, "fraction": fraction} | other


def result(
    folder: Path, name: str, date: str, rows: list[dict[str, Any]], others: list[dict[str, Any]], kind: str = "layer"
) -> None:
    """Write ``folder/name.json``, with ``others`` as the peers' rows."""
    head = {"kind": kind, "date": date, "gpu": "NVIDIA H200", "driver": "580", "sm_clock": "1980 MHz"}
    told = {"commit": "0123456789abcdef", "command": f"moelet bench layer {name}", "read_bandwidth_tb_s": 4.587}
    report.write(folder / f"{name}.json", head | told | {"rows": rows, "peers": others})
