"""Times one layer forward on the GPU against the bytes it must read, checks it in the same run, and writes the rows.

Method. One captured graph holds R forwards: 8 up to 32 tokens, 4 up to 256, 2 above, more where they would move less
than 250 MB. Each has its own memory, hidden states and routing, and they take the complete weight sets in turn, so that
L2 serves no weights; between replays a read of 256 MB sweeps L2, untimed. A time is that of a replay between two
events, over R: the median, 10th and 90th percentile of all replays. Top-k is given, as a router gives it.

Memory is filled with NaN before the inputs are written. The first outputs are compared with the float64 oracle, and
those after the last replay with the first, bit for bit; a row over the error limit or not repeatable fails the run.

The floor is the bytes of ``floor.py`` at the read bandwidth that a bulk-copy kernel reaches in the same run.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moelet.graphs.program import Plan
from moelet.layer.errors import ConfigurationError

from . import against, options
from .measurement import LARGEST_ERROR, LayerMeasurement
from .report import Results, Row, Table, circumstances, fixed
from .rig import Rig

TOKENS = (1, 4, 16, 32, 64, 128, 256)
TABLE = Table("T:5 LoRA:13 plan:23 us:7 p10:7 p90:7 experts:7 floor:7 of-it:6 /base:6 error:7")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench layer", description=(__doc__ or "").split("\n")[0])
    options.shape_options(made)
    work = made.add_argument_group("work")
    options.workload_options(work)
    work.add_argument("--shared-outer", action="store_true", help="measure adapters of the shared-outer layout too")
    work.add_argument("--plan", choices=["auto", "all", *(plan.value for plan in Plan)], default="auto")
    options.run_options(made, tokens=TOKENS)
    made.add_argument("--against", type=Path, metavar="RESULT", help="exit 1 if a row is over 3 %% slower than there")
    made.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with float64")
    made.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="time peers as well")
    return made


def line(row: Row) -> str:
    """A row of the table on the terminal; a peer's stands under its name."""
    lora = f"r{row['rank']} x{row['adapters']}" if row.get("rank") else None
    if row.get("layout") == "shared_outer":
        lora = f"{lora} outer"
    cells = [row["tokens"], lora, row.get("peer") or row["plan"]]
    cells += [fixed(row[name]) for name in ("us", "p10_us", "p90_us", "experts", "floor_us")]
    return TABLE.line(
        [*cells, f"{row['fraction']:.1%}", fixed(row["of_base"], 3), "WRONG" if row["wrong"] else row["error"]]
    )


def main(arguments: Sequence[str]) -> int:
    """Measure; the exit code: 1 where an output is wrong, or a row slower than ``--against`` allows."""
    chosen = parser().parse_args(arguments)
    options.check(chosen)
    layers = options.chosen_shapes(chosen)
    earlier = against.read(chosen.against) if chosen.against else None
    if earlier and chosen.json and chosen.json.resolve() == chosen.against.resolve():
        raise ConfigurationError(f"--json would write over what --against compares with, {chosen.against}")
    rig = Rig(chosen.gpu)
    results = Results(circumstances("layer", arguments, rig, chosen.commit), chosen.json)
    print(f"{rig.device.name}, read bandwidth {rig.bandwidth * 1e-12:.3f} TB/s, times in us")
    for name, spec in layers.items():
        print(f"\n{name}\n{TABLE.heading}", flush=True)
        results.start(name)
        measurement = LayerMeasurement(rig, chosen, name, spec)
        for row in measurement:
            results.notes = {"absent_peers": measurement.absent_peers}
            results.add(row)
            print(line(row), flush=True)
    rig.close()
    return verdict(results, earlier)


def verdict(results: Results, earlier: Mapping[str, Any] | None) -> int:
    """The exit code, with a line on stderr for each row behind it. Raises ``ConfigurationError`` where nothing was
    measured, or none of it is in ``earlier``."""
    if not results.all_rows:
        raise ConfigurationError("nothing was measured: there are fewer tokens than --adapters")
    for row in results.wrong:
        differ = "; replays differ" if row["repeatable"] is False else ""
        error = f"error {row['error']}, at most {LARGEST_ERROR} is right"
        print(f"wrong output: {against.named(row)}: {error}{differ}", file=sys.stderr)
    slower = told(results, earlier) if earlier else []
    return 1 if results.wrong or slower else 0


def told(results: Results, earlier: Mapping[str, Any]) -> list[str]:
    """The rows that are slower than in an earlier report, told on stderr with what was not compared."""
    if earlier.get("gpu") != results.head["gpu"]:
        print(f"the earlier result is of another GPU: {earlier.get('gpu')}", file=sys.stderr)
    comparison = against.compare(results.all_rows, earlier["rows"])
    for sentence in comparison.slower:
        print(f"slower: {sentence}", file=sys.stderr)
    for name in comparison.alone:
        print(f"not in the earlier result: {name}", file=sys.stderr)
    print(f"{comparison.compared} of {len(results.all_rows)} rows compared with {earlier.get('date')}")
    return comparison.slower


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
