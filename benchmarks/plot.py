"""Draws the newest times of a layer over the token count, against the floor and the peers, as a PNG."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moelet.layer.errors import ConfigurationError

from . import options, shapes
from .cells import described, fastest
from .newest import Newest, newest, published, source
from .report import RESULTS

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def draw(axes: Any, found: Newest, shape: str, kinds: Sequence[tuple[int, int | str, str | None]]) -> None:
    """One panel: ours and the floor for each of ``kinds``, and the peers of the first."""
    for colour, (rank, adapters, layout) in zip(COLOURS, kinds, strict=False):
        best = fastest([r for r in found.rows if (r["rank"], r["adapters"], r["layout"]) == (rank, adapters, layout)])
        tokens = sorted(best)
        label = f"moelet, {described(rank, adapters, layout)}"
        axes.plot(tokens, [best[t]["us"] for t in tokens], "o-", color=colour, linewidth=2, label=label)
        axes.plot(tokens, [best[t]["floor_us"] for t in tokens], ":", color=colour, label="its floor")
    first, last = found.tokens[0], found.tokens[-1]
    for peer in published(shape):
        if (peer.rank, peer.adapters) == kinds[0][:2]:
            shown = {tokens: us for tokens, us in peer.us.items() if first <= tokens <= last}
            axes.plot(list(shown), list(shown.values()), "x--", linewidth=0.8, label=peer.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(found.tokens, [str(t) for t in found.tokens])
    axes.set_xlabel("tokens")
    axes.set_ylabel("µs for one layer")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="x-small")


def plot(found: Newest, shape: str, path: Path) -> None:
    """Two panels, base and LoRA, into ``path``. Raises ``ConfigurationError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"drawing needs matplotlib, which cannot be imported: {error}") from error
    kinds = list(dict.fromkeys((row["rank"], row["adapters"], row["layout"]) for row in found.rows))
    panels = [panel for panel in ([k for k in kinds if not k[0]], [k for k in kinds if k[0]]) if panel]
    figure = Figure(figsize=(7 * len(panels), 6), layout="constrained")
    for index, panel in enumerate(panels, start=1):
        draw(figure.add_subplot(1, len(panels), index), found, shape, panel)
    report = found.report
    title = f"{shape}, one layer, {report['gpu']}, {report['date'][:10]}"
    figure.suptitle(f"{title}; peers {source()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """Draw every shape asked for, or every shape that has results; the exit code 0."""
    parser = options.Parser(prog="moelet bench plot", description=__doc__)
    parser.add_argument("--shape", action="append", choices=shapes.names(), help="repeatable; those with results")
    parser.add_argument("--from", dest="file", metavar="FILE", help="of results/, to draw instead; takes --shape")
    parser.add_argument(
        "--out", type=options.folder, default=RESULTS, metavar="DIR", help="folder of the pictures (results)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.file and not chosen.shape:
        raise ConfigurationError("--from takes --shape, which says what to draw of it")
    found = {shape: newest("layer", shape, file=chosen.file) for shape in chosen.shape or shapes.names()}
    for shape, result in found.items():
        if result is not None:
            for told in result.passed_over:
                print(f"{shape}: {told}", file=sys.stderr)
            path = chosen.out / f"layer-{shape}.png"
            plot(result, shape, path)
            print(path)
    if not any(found.values()):
        raise ConfigurationError("there are no results of moelet bench layer to draw")
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
