"""Nsight Compute: where it is, which hardware counters it knows, a run of it, and what its CSV says of each kernel.

The CSV is that of ``--csv --print-units base``: a line for each kernel and metric, behind whatever lines ncu says
first. Numbers may have commas between thousands, and a counter that could not be read is ``n/a``.
"""

import csv
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moelet.layer.errors import ConfigurationError

from .report import ROOT

USUAL_PLACE = Path("/usr/local/cuda/bin/ncu")
CHIP = "gh100"
"""What ncu calls Hopper's data centre GPUs, the H200 among them."""
SECTOR_BYTES = 32
OPTIONS = (
    *("--target-processes", "all", "--profile-from-start", "off"),
    *("--clock-control", "none", "--cache-control", "all"),
    *("--csv", "--print-units", "base"),
)
"""Clocks stay as they are when the layer is timed; caches are flushed before each kernel."""
PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNIT = re.compile(r"([numKMGT]?)(byte|sector|second|s|%|)")
QUERY_S = 120.0


@dataclass(frozen=True, slots=True)
class Counter:
    """What results call a counter, its metrics in ncu (the first that there is), what their numbers are multiplied by,
    and to how many decimals they are kept. An ``essential`` one is asked for even where ncu does not list it."""

    name: str
    metrics: tuple[str, ...]
    scale: float = 1.0
    digits: int | None = None
    essential: bool = False


COUNTERS = (
    Counter("time_us", ("gpu__time_duration.sum",), scale=1e6, digits=3, essential=True),
    Counter("dram_read_bytes", ("dram__bytes_read.sum", "dram__bytes_op_read.sum"), essential=True),
    Counter("dram_write_bytes", ("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
    Counter("l2_read_bytes", ("lts__t_sectors_op_read.sum",), scale=SECTOR_BYTES),
    Counter("to_sm_bytes", ("l1tex__m_xbar2l1tex_read_bytes.sum",)),
    Counter("dram_pct", ("dram__throughput.avg.pct_of_peak_sustained_elapsed",), digits=2),
    Counter("l2_hit_pct", ("lts__t_sector_hit_rate.pct",), digits=2),
    Counter(
        "tensor_pct",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        ),
        digits=2,
    ),
)


@dataclass(slots=True)
class Profiled:
    """One kernel as ncu saw it: its function, grid and block, and (number, unit) by metric; None is ``n/a``."""

    function: str
    grid: list[int]
    block: list[int]
    metrics: dict[str, tuple[float | None, str]] = field(default_factory=dict)

    def counters(self, chosen: Mapping[str, str]) -> dict[str, float | int | None]:
        """Every counter by name, None where it was not taken. Raises ``ConfigurationError`` for an unknown unit."""
        return {each.name: self._value(each, chosen.get(each.name)) for each in COUNTERS}

    def _value(self, counter: Counter, metric: str | None) -> float | int | None:
        number, unit = self.metrics.get(metric or "", (None, ""))
        if number is None:
            return None
        parsed = UNIT.fullmatch(unit)
        if parsed is None or (parsed[2] in ("second", "s")) != (counter.name == "time_us"):
            raise ConfigurationError(f"ncu gives {metric} in {unit!r}, expected bytes, sectors, seconds or per cent")
        return round(number * PREFIXES[parsed[1]] * counter.scale, counter.digits)


def find(given: Path | None) -> Path:
    """The program. Raises ``ConfigurationError`` where it is not."""
    if given is not None:
        if not os.access(given, os.X_OK):
            raise ConfigurationError(f"--ncu {given} is no program that can be run")
        return given.resolve()
    if found := shutil.which("ncu"):
        return Path(found)
    if os.access(USUAL_PLACE, os.X_OK):
        return USUAL_PLACE
    raise ConfigurationError(
        f"ncu, NVIDIA Nsight Compute, is neither on PATH nor at {USUAL_PLACE}: install it, or name it with --ncu"
    )


def version(program: Path) -> str:
    """What ncu calls its version; ``unknown`` where it does not say."""
    found = re.search(r"^Version (\S+)", _said(program, "--version"), re.M)
    return found[1] if found else "unknown"


def known_metrics(program: Path) -> set[str]:
    """The metrics of ``CHIP`` that ncu lists, without their ``.sum`` and the like; empty where it lists none."""
    return listed(_said(program, "--query-metrics", "--chips", CHIP))


def listed(text: str) -> set[str]:
    """The metrics that begin a line of ``--query-metrics``."""
    return set(re.findall(r'^\s*"?([a-z]\w*?__\w+)', text, re.M))


def choose(known: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The metric to take for each counter, and the first metric of each counter that has none among ``known``."""
    chosen: dict[str, str] = {}
    for counter in COUNTERS:
        found = [metric for metric in counter.metrics if metric.split(".")[0] in known]
        if found or counter.essential:
            chosen[counter.name] = (found or counter.metrics)[0]
    return chosen, [counter.metrics[0] for counter in COUNTERS if counter.name not in chosen]


def profile(program: Path, metrics: Collection[str], command: Sequence[str], log: Path, limit_s: float) -> None:
    """Run ``command`` under ncu, which writes to ``log``; what both print goes to ``log`` with ``.out`` behind it.

    Raises ``ConfigurationError`` where ncu or the command fails, or takes over ``limit_s``.
    """
    asked = [str(program), *OPTIONS, "--metrics", ",".join(metrics), "--log-file", str(log), *command]
    printed = log.with_name(f"{log.name}.out")
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C"}
    with (
        printed.open("wb") as out,
        subprocess.Popen(
            asked, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the profiled program is a child of ncu's
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigurationError(
                    f"ncu took over --limit-s {limit_s:.0f}: ask for fewer tokens, ranks or adapters"
                ) from None
            raise
    said = "\n".join(path.read_text(errors="replace") for path in (log, printed) if path.is_file())
    if complaint := wrong(said, code):
        raise ConfigurationError(complaint)


def wrong(said: str, code: int) -> str | None:
    """What went wrong, in one sentence, by what ncu and the program printed and by the exit code."""
    if "ERR_NVGPUCTRPERM" in said:
        return (
            "the driver lets this user read no GPU counters (ERR_NVGPUCTRPERM): run as root, or load the driver "
            "with NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = [line.strip() for line in said.splitlines()]
    told = [line.removeprefix("==ERROR== ") for line in lines if line.startswith("==ERROR==")]
    own = [line.removeprefix("moelet bench: ") for line in lines if line.startswith("moelet bench: ")]
    if own or told:
        return f"the profiled forwards failed: {(own or told)[0]}"
    if code:
        return f"ncu ended with {code}: {next(filter(None, reversed(lines)), 'it printed nothing')}"
    if "No kernels were profiled" in said:
        return "ncu profiled no kernel: the forwards did not run between cuProfilerStart and cuProfilerStop"
    return None


def kernels(text: str) -> list[Profiled]:
    """The kernels of a log, in the order in which they ran. Raises ``ConfigurationError`` where it has no table."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise ConfigurationError("ncu wrote no table of metrics")
    found: dict[tuple[str, str], Profiled] = {}
    for row in _rows(lines[starts[0] :]):
        key = row["Process ID"], row["ID"]
        if key not in found:
            found[key] = Profiled(_function(row["Kernel Name"]), _sizes(row["Grid Size"]), _sizes(row["Block Size"]))
        found[key].metrics[row["Metric Name"]] = _number(row["Metric Value"]), row["Metric Unit"].strip()
    return list(found.values())


def _rows(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(lines)
    needed = {"ID", "Process ID", "Kernel Name", "Grid Size", "Block Size", "Metric Name", "Metric Unit"}
    if missing := (needed | {"Metric Value"}) - set(reader.fieldnames or ()):
        raise ConfigurationError(f"ncu's table lacks the columns {', '.join(sorted(missing))}")
    for row in reader:
        if row["ID"].isdigit() and row["Metric Value"] is not None:  # else a line of ncu's own, or another header
            yield row


def _function(name: str) -> str:
    """``expert_mlp`` of ``void expert_mlp<3>(int)``."""
    return name.split("(")[0].split("<")[0].split()[-1]


def _sizes(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _number(text: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _said(program: Path, *arguments: str) -> str:
    try:
        ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{program} {arguments[0]} could not be run: {error}") from error
    return ran.stdout
