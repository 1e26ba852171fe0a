"""Reads the GPU's hardware counters of every kernel of a layer forward, by NVIDIA Nsight Compute (ncu).

For each setting one of the forwards that ``bench layer`` times is captured as a graph of its own, and ncu runs its
kernels one after another. It repeats a kernel until it has all counters, with memory put back and caches flushed each
time, so that no weight comes from L2: what turns over weight sets are for in ``bench layer``. What the kernel before
left in L2 is flushed too, and counts as read from DRAM; no kernel overlaps its neighbours. So the bytes are those of a
forward or a few more, and the times are those of kernels alone, which add up to more than a forward's. Clocks are left
as they are.

One run of ncu takes all settings of a shape. ``--folder`` keeps its log and what was run (``counted.py``), from which
``--reread`` makes the result again without a GPU.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from moelet.layer.errors import ConfigurationError, MoeletError

from . import ncu, options
from .against import named
from .report import Results, Row, Table, circumstances, fixed, write
from .rig import Rig

TOKENS = (1, 4, 16, 32, 64, 128, 256)
LIMIT_S = 300.0
TABLE = Table("T:5 LoRA:13 kernel:24 us:8 read-MB:9 of-floor:8 write-MB:9 L2-MB:9 SM-MB:9 of-peak:7 L2-hit:7")
FORWARD = "the forward"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench counters", description=(__doc__ or "").split("\n")[0])
    options.shape_options(made)
    work = made.add_argument_group("work")
    options.workload_options(work)
    options.one_plan_option(work)
    options.run_options(made, tokens=TOKENS, timed=False)
    made.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with float64")
    made.add_argument("--ncu", type=Path, metavar="PATH", help=f"Nsight Compute (that of PATH, or {ncu.USUAL_PLACE})")
    made.add_argument(
        "--limit-s", type=options.seconds, default=LIMIT_S, help=f"longest run of ncu for a shape ({LIMIT_S:.0f})"
    )
    made.add_argument("--folder", type=options.folder, metavar="DIR", help="keep what ncu wrote there")
    made.add_argument("--reread", action="store_true", help="only read --folder again; needs no GPU")
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure, or read again; the exit code: 1 where an output is wrong."""
    chosen = parser().parse_args(arguments)
    options.check(chosen)
    layers = options.chosen_shapes(chosen)
    if chosen.reread and chosen.folder is None:
        raise ConfigurationError("--reread takes --folder, which says what to read")
    program = None if chosen.reread else ncu.find(chosen.ncu)
    with kept(chosen.folder) as folder:
        if program is not None:
            write(folder / "head.json", head(program, arguments, chosen))
        results = Results(read(folder / "head.json"), chosen.json)
        print(f"{results.head['gpu']}, ncu {results.head['ncu']}, absent counters: {results.head['absent_counters']}")
        for name in layers:
            if program is not None:
                run(program, name, arguments, folder, results.head["counters"], chosen.limit_s)
            results.start(name)
            print(f"\n{name}\n{TABLE.heading}", flush=True)
            show(results, [{"shape": name, **row} for row in rows(folder, name, results.head)])
    complaints = dict.fromkeys(f"wrong output: {named(row)}: error {row['error']}" for row in results.wrong)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


@contextmanager
def kept(given: Path | None) -> Iterator[Path]:
    """The folder to work in; one of our own is kept, and named in the complaint, where something goes wrong."""
    folder = given.resolve() if given is not None else Path(tempfile.mkdtemp(prefix="moelet-counters-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except MoeletError as error:
        if not any(folder.iterdir()):
            if given is None:
                folder.rmdir()
            raise
        raise ConfigurationError(f"{error} (what ncu wrote is in {folder})") from error
    if given is None:
        shutil.rmtree(folder)


def head(program: Path, arguments: Sequence[str], chosen: argparse.Namespace) -> Row:
    """The circumstances, with the bandwidth as it is without ncu, and which counters are taken."""
    counters, absent = ncu.choose(ncu.known_metrics(program))
    rig = Rig(chosen.gpu)
    told = circumstances("counters", arguments, rig, chosen.commit)
    rig.close()
    asked = {"ncu": ncu.version(program), "ncu_options": " ".join(ncu.OPTIONS)}
    return {**told, **asked, "counters": counters, "absent_counters": absent}


def run(
    program: Path, shape: str, arguments: Sequence[str], folder: Path, counters: Mapping[str, str], limit_s: float
) -> None:
    """Run all settings of ``shape`` under ncu."""
    manifest, log = folder / f"{shape}.json", folder / f"{shape}.csv"
    for old in (manifest, log):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{__package__}.counted", *arguments, "--only", shape, "--manifest", str(manifest)]
    ncu.profile(program, counters.values(), command, log, limit_s)


def read(path: Path) -> Row:
    """A JSON file that a run left. Raises ``ConfigurationError`` where there is none."""
    try:
        found: Row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not what a run of counters leaves: {error}") from error
    return found


def rows(folder: Path, shape: str, circumstances: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each kernel of each setting, in order. Raises ``ConfigurationError`` where ncu saw other kernels."""
    settings = read(folder / f"{shape}.json")["settings"]
    log = folder / f"{shape}.csv"
    if not log.is_file():
        raise ConfigurationError(f"{log} is not there: ncu wrote no log")
    profiled = ncu.kernels(log.read_text(encoding="utf-8", errors="replace"))
    launched = [(each["setting"], kernel) for each in settings for kernel in each["kernels"]]
    for number in range(max(len(profiled), len(launched))):
        ran = launched[number][1]["function"] if number < len(launched) else None
        seen = profiled[number].function if number < len(profiled) else None
        if ran != seen:
            raise ConfigurationError(f"kernel {number + 1} of {len(launched)} is {ran}, and ncu saw {seen}")
    for (setting, kernel), one in zip(launched, profiled, strict=True):
        floor_us = setting["floor_bytes"] / circumstances["read_bandwidth_tb_s"] * 1e-6
        counted = one.counters(circumstances["counters"])
        yield {**setting, "floor_us": round(floor_us, 2), **kernel, "grid": one.grid, "block": one.block, **counted}


def show(results: Results, measured: Sequence[Row]) -> None:
    """Keep the rows and print them, each forward's sum behind its kernels."""
    for _, group in groupby(measured, key=lambda row: (row["tokens"], row["rank"], row["adapters"])):
        kernels = list(group)
        for row in kernels:
            results.add(row)
            print(line(row))
        print(line(summed(kernels)), flush=True)


def summed(kernels: Sequence[Row]) -> Row:
    """The kernels of one forward as one row: bytes are their sums, None where one is not known."""
    total: Row = {**kernels[0], "kernel": FORWARD, "kernel_floor_bytes": kernels[0]["floor_bytes"]}
    for name in ("time_us", "dram_read_bytes", "dram_write_bytes", "l2_read_bytes", "to_sm_bytes"):
        values = [row[name] for row in kernels]
        total[name] = None if None in values else sum(values)
    return {**total, "dram_pct": None, "l2_hit_pct": None}


def over_floor(row: Row) -> float | None:
    """Bytes read from DRAM over those that the kernel must read; None where either is not known."""
    read_bytes, floor = row["dram_read_bytes"], row["kernel_floor_bytes"]
    return read_bytes / floor if read_bytes is not None and floor else None


def line(row: Row) -> str:
    """A row of the table on the terminal."""
    lora = f"r{row['rank']} x{row['adapters']}" if row["rank"] else None

    def megabytes(name: str) -> str | None:
        return None if row[name] is None else fixed(row[name] * 1e-6, 2)

    cells = [row["tokens"], lora, row["kernel"], fixed(row["time_us"], 2), megabytes("dram_read_bytes")]
    cells += [fixed(over_floor(row), 3), megabytes("dram_write_bytes"), megabytes("l2_read_bytes")]
    return TABLE.line([*cells, megabytes("to_sm_bytes"), fixed(row["dram_pct"]), fixed(row["l2_hit_pct"])])


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
