"""A benchmark's results: what was run where and when, written as JSON, and tables of short lines."""

import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from moelet.graphs.compiler import nvrtc_version
from moelet.layer.errors import ConfigurationError

from . import shapes
from .rig import Rig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock",
    "clocks.mem": "memory_clock",
    "clocks.max.sm": "max_sm_clock",
    "power.limit": "power_limit",
    "power.draw": "power_draw",
}
APART = ("--json", "--folder", "--ncu", "--commit", "--against")
"""Options that say where something lies, or which commit it is of."""
Row = dict[str, Any]


def circumstances(kind: str, arguments: Sequence[str], rig: Rig, commit: str | None) -> Row:
    """What a reader needs to repeat the run; the clocks are read right after the bandwidth was measured."""
    return {
        "kind": kind,
        "command": shlex.join(["moelet", "bench", kind, *measuring(arguments)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "gpu": rig.device.name,
        "sm_count": rig.device.sm_count,
        **nvidia_smi(rig.pci_bus_id),
        "driver_cuda": ".".join(map(str, rig.device.driver_version)),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "torch": torch.__version__,
        "read_bandwidth_tb_s": round(rig.bandwidth * 1e-12, 4),
    }


def host_circumstances(kind: str, arguments: Sequence[str], commit: str | None) -> Row:
    """The same of a run that needs no GPU; ``load_average`` is the machine's over the minute before."""
    return {
        "kind": kind,
        "command": shlex.join(["moelet", "bench", kind, *measuring(arguments)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "uvicorn": version("uvicorn"),
    }


def cpu_model() -> str:
    """The CPU as Linux names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measuring(arguments: Sequence[str]) -> list[str]:
    """The arguments less those of ``APART``, which are no part of how a result was measured."""
    kept = []
    given = iter(arguments)
    for argument in given:
        if argument in APART:
            next(given, None)
        elif argument.split("=")[0] not in APART:
            kept.append(argument)
    return kept


def git_commit() -> str:
    """The commit of this checkout, ``+changes`` behind it where code differs from it; ``unknown`` outside of git."""
    try:
        commit = _output("git", "rev-parse", "HEAD")
        changed = _output(
            "git", "status", "--porcelain", "--", "*.py", "*.cu", "*.cuh", "graphs/*.json", "pyproject.toml"
        )
        return commit + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def nvidia_smi(pci_bus_id: str) -> Row:
    """Driver, clocks and power of one GPU as nvidia-smi tells them; empty where it cannot be run or has no such GPU."""
    query = f"--query-gpu={','.join(SMI_FIELDS)}"
    try:
        line = _output("nvidia-smi", query, "--format=csv,noheader", f"--id={pci_bus_id}")
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(SMI_FIELDS.values(), (value.strip() for value in line.split(",")), strict=False))


def _output(*command: str) -> str:
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


class Results:
    """Rows and peers' rows as they come, written after each: into the file given, or into one for each shape."""

    def __init__(self, head: Row, path: Path | None) -> None:
        self.head = head
        self.all_rows: list[Row] = []
        self.notes: Row = {}
        self._given = path
        self._path = path
        self._shape = ""
        self._rows: list[Row] = []
        self._peers: list[Row] = []

    def start(self, shape: str) -> None:
        """What follows is of ``shape``."""
        if self._given is None:
            self._path, self._shape = None, shape
            self._rows, self._peers = [], []

    def add(self, row: Row) -> None:
        """Keep a row; one with a ``peer`` is a peer's."""
        if "peer" in row:
            self._peers.append(row)
        else:
            self._rows.append(row)
            self.all_rows.append(row)
        if self._path is None:
            self._path = result_path(self.head, self._shape)
        write(self._path, {**self.head, **self.notes, "rows": self._rows, "peers": self._peers})

    @property
    def wrong(self) -> list[Row]:
        """The rows of ours whose outputs were wrong."""
        return [row for row in self.all_rows if row.get("wrong")]


def result_path(report: Mapping[str, Any], shape: str) -> Path:
    """Where the results of one shape go by default: ``<date>-<kind>-<shape>.json``, or ``-2.json`` and so on behind
    those that are there already."""
    return unused(RESULTS / f"{report['date'][:10]}-{report['kind']}-{shape}.json")


def unused(path: Path) -> Path:
    """``path``, or the first with a number behind its name that nothing has yet, from now on an empty file: no result
    is written over, not by runs that began together either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    for each in chain([path], numbered):
        with suppress(FileExistsError):
            each.touch(exist_ok=False)
            break
    return each


def read(path: Path) -> Row:
    """The JSON object in a file, its shapes called as they are today. Raises ``ConfigurationError``, which names the
    file, where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no result that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} is no result of moelet bench")
    return _renamed(found)


def _renamed(report: Row) -> Row:
    """``report`` with the names of layers that were run with their shared experts, which had those of the layers
    without them before there was a name for each."""
    if "--shared" in str(report.get("command")).split():
        for rows in (report.get("rows"), report.get("peers")):
            for row in rows if isinstance(rows, list) else ():
                if isinstance(row, dict) and isinstance(row.get("shape"), str):
                    row["shape"] = shapes.with_shared(row["shape"])
    return report


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report whole, through a file beside it. NaN is refused: it is no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def rounded(value: float, digits: int = 4) -> float | None:
    """``value`` with so many significant digits; None where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


class Table:
    """Lines of a table, one at a time; ``columns`` are headings with their widths, ``"T:5 plan:23"``."""

    def __init__(self, columns: str) -> None:
        headings, widths = zip(*(column.rsplit(":", 1) for column in columns.split()), strict=True)
        self._widths = [int(width) for width in widths]
        self.heading = self.line(headings)

    def line(self, cells: Sequence[object]) -> str:
        """One row, cells to the right of their columns; None is a dash."""
        shown = ("-" if cell is None else str(cell) for cell in cells)
        return "  ".join(cell.rjust(width) for cell, width in zip(shown, self._widths, strict=True))


def fixed(value: float | None, digits: int = 1) -> str | None:
    """``value`` with so many decimals, for a table."""
    return None if value is None else f"{value:.{digits}f}"
