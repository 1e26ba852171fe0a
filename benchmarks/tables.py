"""Rewrites the marked regions of README.md and benchmarks/README.md, and the engine's table of plans, from the newest
results.

A region stands between ``<!-- bench:start NAME -->`` and ``<!-- bench:end -->``. NAME is ``layer-SHAPE``,
``kernels-SHAPE``, ``counters-SHAPE``, ``host-SHAPE`` or ``overhead-SHAPE``, with ``-zipf`` or ``-eight`` behind it for
another routing than the uniform one, or ``-ranks`` for several LoRA ranks side by side. A region without a result says
so. The newest result is the newest of those that have all that was measured in the fullest; newer ones that lack some
of it are named on stderr. ``<!-- bench:start NAME from FILE -->`` takes what is in ``results/FILE`` instead, however
little. ``--check`` changes nothing and exits 1 where a table is not what the results say.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from moelet.graphs.plan_choice import TABLE
from moelet.layer.errors import ConfigurationError

from . import options, plan_table
from .cells import (
    DASH,
    added,
    described,
    dram_share,
    fastest,
    header,
    markdown,
    measured,
    ratio,
    read_megabytes,
    throughput,
    timed,
)
from .counters import summed
from .floor import H200_TFLOPS, arithmetic_us
from .newest import Newest, best_published, newest, published_date
from .report import RESULTS, ROOT, Row, measuring
from .shapes import called, names

FILES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
REGION = re.compile(r"(<!-- bench:start (\S+)(?: from (\S+))? -->\n).*?(<!-- bench:end -->)", re.S)
MARK = "<!-- bench:"
NAME = re.compile(r"(layer|kernels|counters|host|overhead)-(.+?)(?:-(zipf|eight|ranks))?")
NO_RESULT = "No result yet."


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """``text`` with every region as the results in ``folder`` say. Raises ``ConfigurationError`` for a wrong name, or a
    region that does not end before the next one begins."""
    whole = [match for match in REGION.finditer(text) if match[0].count(MARK) == 2]
    if text.count(MARK) != 2 * len(whole):
        raise ConfigurationError(f"of {text.count(MARK)} marks of regions only {2 * len(whole)} are in pairs")

    def region(match: re.Match[str]) -> str:
        return f"{match[1]}{content(match[2], folder, match[3])}\n{match[4]}"

    return REGION.sub(region, text)


def passed_over(text: str, folder: Path = RESULTS) -> Iterator[str]:
    """A sentence for each result that is newer than what a region of ``text`` has, and lacks some of it."""
    for _, name, file, _ in REGION.findall(text):
        found = result(name, folder, file or None)
        yield from (f"{name}: {told}" for told in (found.passed_over if found else ()))


def content(name: str, folder: Path = RESULTS, file: str | None = None) -> str:
    """The Markdown of one region, out of the newest full result or of ``file``."""
    found = result(name, folder, file)
    if found is None:
        return NO_RESULT
    kind, shape, _ = parsed(name)
    return "\n".join([*TABLES[kind](found, shape), "", provenance(found)])


def result(name: str, folder: Path, file: str | None) -> Newest | None:
    """What the region ``name`` shows; None where there is nothing yet."""
    kind, shape, rest = parsed(name)
    ranks = rest == "ranks"
    return newest(kind, shape, "uniform" if ranks else rest or "uniform", folder, ranks=ranks, file=file)


def parsed(name: str) -> tuple[str, str, str | None]:
    """The kind, the shape, and what is behind it. Raises ``ConfigurationError`` for what names no table."""
    found = NAME.fullmatch(name)
    if found is None or called(found[2]) is None:
        shapes = f"one of {', '.join(TABLES)}, and has the name of a shape behind it: {', '.join(names())}"
        raise ConfigurationError(f"no table is called {name}: its name begins with {shapes}")
    return found[1], found[2], found[3]


def provenance(found: Newest) -> str:
    """The sentence under a table: when, where, what, by which command."""
    report = found.report
    command = shlex.join(measuring(shlex.split(report["command"])))
    if "cpu" in report:
        where = f"{report['cpu']}, {report['cores']} cores, load {report['load_average']}"
        return f"{report['date'][:10]}, {where}, commit {report['commit'][:12]}: `{command}`"
    clock = f" at {report['sm_clock']}" if "sm_clock" in report else ""
    return (
        f"{report['date'][:10]}, {report['gpu']}{clock}, driver {report.get('driver', 'unknown')}, read bandwidth "
        f"{report['read_bandwidth_tb_s']:.2f} TB/s, commit {report['commit'][:12]}: `{command}`"
    )


def layer_table(found: Newest, shape: str) -> list[str]:
    """Times of base and LoRA over token counts, the best plan of each, beside the floor and the peers."""
    tokens = found.tokens
    kinds = list(dict.fromkeys((row["rank"], row["adapters"], row["layout"]) for row in found.rows))
    lines = header("µs (share of the floor)", tokens)
    for kind in kinds:
        best = fastest([row for row in found.rows if (row["rank"], row["adapters"], row["layout"]) == kind])
        lines.append(markdown(described(*kind), [timed(best.get(t)) for t in tokens]))
        if kind[0]:
            lines.append(markdown("– over base", [ratio(best.get(t)) for t in tokens]))
        else:
            lines.append(markdown("floor", [DASH if t not in best else f"{best[t]['floor_us']:.1f}" for t in tokens]))
            if (spec := called(shape)) is not None and "H200" in found.report["gpu"]:
                times = [arithmetic_us(spec, t) for t in tokens]
                lines.append(markdown(f"its arithmetic at {H200_TFLOPS:.0f} TFLOP/s", [f"{us:.1f}" for us in times]))
    for peer in dict.fromkeys(row["peer"] for row in found.peers):
        own = fastest([row for row in found.peers if row["peer"] == peer])
        lines.append(markdown(f"{peer}, base, same run", [timed(own.get(t)) for t in tokens]))
    for rank, adapters, layout in kinds:
        alike = layout != "shared_outer" and found.rows[0]["routing"] == "uniform"  # as peers were measured
        published = best_published(shape, rank, adapters) if alike else {}
        if any(t in published for t in tokens):
            cells = [f"{published[t].us[t]:.1f}" if t in published else DASH for t in tokens]
            lines.append(markdown(f"best peer, {described(rank, adapters, layout)}, {published_date()}", cells))
    return lines


def kernels_table(found: Newest, shape: str) -> list[str]:  # noqa: ARG001
    """What each kernel adds, and how fast it reads, over token counts."""
    tokens = found.tokens
    lines = header("µs (GB/s)", tokens)
    for rank, adapters in dict.fromkeys((row["rank"], row["adapters"]) for row in found.rows):
        rows = [row for row in found.rows if (row["rank"], row["adapters"]) == (rank, adapters)]
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            by_tokens = {row["tokens"]: row for row in rows if row["kernel"] == kernel}
            name = f"{kernel}, {described(rank, adapters, None)}"
            lines.append(markdown(name, [added(by_tokens.get(t)) for t in tokens]))
    return lines


def counters_table(found: Newest, shape: str) -> list[str]:  # noqa: ARG001
    """What each forward must read and reads from DRAM, and how busy DRAM is in the kernels that read weights."""
    tokens = found.tokens
    lines = header("MB (over the floor)", tokens)
    for rank, adapters in dict.fromkeys((row["rank"], row["adapters"]) for row in found.rows):
        rows = [row for row in found.rows if (row["rank"], row["adapters"]) == (rank, adapters)]
        forwards = {t: summed(own) for t in tokens if (own := [row for row in rows if row["tokens"] == t])}
        what = described(rank, adapters, None)
        floors = [f"{forwards[t]['floor_bytes'] * 1e-6:.1f}" if t in forwards else DASH for t in tokens]
        lines.append(markdown(f"{what}, the floor", floors))
        lines.append(markdown(f"{what}, read from DRAM", [read_megabytes(forwards.get(t)) for t in tokens]))
        for kernel in dict.fromkeys(row["kernel"] for row in rows if row["kernel_floor_bytes"]):
            by_tokens = {row["tokens"]: row for row in rows if row["kernel"] == kernel}
            cells = [dram_share(by_tokens.get(t)) for t in tokens]
            lines.append(markdown(f"– {kernel}: TB/s from DRAM (of its peak)", cells))
    return lines


def host_table(found: Newest, shape: str) -> list[str]:  # noqa: ARG001
    """Host to host, the graph alone and the difference, over token counts, from pageable and from pinned memory."""
    lines = header("µs", found.tokens)
    kinds = [(row["rank"], row["adapters"], row.get("memory")) for row in found.rows]
    for rank, adapters, memory in dict.fromkeys(kinds):
        alike = (rank, adapters, memory)
        by_tokens = {row["tokens"]: row for row, kind in zip(found.rows, kinds, strict=True) if kind == alike}
        what = described(rank, adapters, None) + (f", {memory}" if memory else "")  # older results do not say
        lines += host_lines(by_tokens, found.tokens, what)
    return lines


def host_lines(by_tokens: Mapping[int, Row], tokens: Sequence[int], what: str) -> list[str]:
    """The lines of one kind of forward."""
    names = {
        "us": "host to host",
        "graph_us": "the graph alone",
        "beside_graph_us": "beside it",
        "ahead_us": "each, the next begun ahead",
    }
    lines = []
    for field, name in names.items():
        if any(field in row for row in by_tokens.values()):
            cells = [f"{by_tokens[t][field]:.1f}" if t in by_tokens else DASH for t in tokens]
            lines.append(markdown(f"{name}, {what}", cells))
    if any("ahead_us" in row for row in by_tokens.values()):
        cells = [throughput(by_tokens.get(t)) for t in tokens]
        lines.append(markdown(f"tokens/s so (of the graph's), {what}", cells))
    return lines


def overhead_table(found: Newest, shape: str) -> list[str]:  # noqa: ARG001
    """The service and the echo over token counts, and how many calls a second many clients get."""
    rows = {(row["server"], row["tokens"]): row for row in found.rows if row["clients"] == 1}
    tokens = sorted({t for _, t in rows})
    lines = header("µs over loopback, one client", tokens)
    for server, name in (("echo", "bare echo"), ("service", "the service over a null engine")):
        lines.append(markdown(name, [measured(rows.get((server, t)), "us", 0) for t in tokens]))
    lines.append(markdown("– over the echo", [measured(rows.get(("service", t)), "of_echo", 2) for t in tokens]))
    for many in (row for row in found.rows if row["clients"] > 1):
        name = f"calls/s of {many['clients']} clients, {'bare echo' if many['server'] == 'echo' else 'the service'}"
        lines.append(markdown(name, [str(many["calls_s"]) if t == many["tokens"] else DASH for t in tokens]))
    return lines


TABLES: dict[str, Callable[[Newest, str], list[str]]] = {
    "layer": layer_table,
    "kernels": kernels_table,
    "counters": counters_table,
    "host": host_table,
    "overhead": overhead_table,
}


def stale(files: Sequence[Path] = FILES, folder: Path = RESULTS) -> Mapping[Path, str]:
    """The files whose tables are not what the results say, with the text that they should have; among them the plans
    that the engine ships."""
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    wanted = {path: rewritten(text, folder) for path, text in texts.items()}
    if files is FILES:
        plans = ROOT / "graphs" / TABLE.name
        texts[plans], wanted[plans] = (
            plans.read_text(encoding="utf-8"),
            plan_table.written(plan_table.plan_table(folder)),
        )
    return {path: wanted[path] for path, text in texts.items() if wanted[path] != text}


def main(arguments: Sequence[str]) -> int:
    """Rewrite, or with ``--check`` only tell; the exit code: 1 where a check finds a stale table."""
    parser = options.Parser(prog="moelet bench tables", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=False, help="change nothing")
    chosen = parser.parse_args(arguments)
    if not RESULTS.is_dir():
        raise ConfigurationError(f"there is no folder of results, {RESULTS}")
    marked = "".join(path.read_text(encoding="utf-8") for path in FILES if path.is_file())
    found = stale()
    for told in dict.fromkeys(passed_over(marked)):
        print(told, file=sys.stderr)
    for path, text in found.items():
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: tables {'are not those of the newest results' * chosen.check or 'rewritten'}")
    return 1 if chosen.check and found else 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
