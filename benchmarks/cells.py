"""Lines and cells of the Markdown tables, and what a row is called in them."""

from collections.abc import Sequence

from .counters import over_floor
from .report import Row

DASH = "–"


def header(what: str, tokens: Sequence[int]) -> list[str]:
    """The two lines that begin a Markdown table."""
    return [markdown(what, [f"T={t}" for t in tokens]), markdown("---", ["---:"] * len(tokens))]


def markdown(first: str, cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join([first, *cells])} |"


def described(rank: int, adapters: int | str, layout: str | None) -> str:
    """What a row was measured with."""
    if not rank:
        return "base"
    return f"LoRA r{rank} ×{adapters}{' shared-outer' if layout == 'shared_outer' else ''}"


def fastest(rows: Sequence[Row]) -> dict[int, Row]:
    """The fastest row of each token count."""
    best: dict[int, Row] = {}
    for row in rows:
        if row["tokens"] not in best or row["us"] < best[row["tokens"]]["us"]:
            best[row["tokens"]] = row
    return best


def timed(row: Row | None) -> str:
    """A cell: the time and its share of the floor."""
    return DASH if row is None else f"{row['us']:.1f} ({row['fraction']:.0%})"


def ratio(row: Row | None) -> str:
    """A cell: the time over the base's."""
    return DASH if row is None or row["of_base"] is None else f"{row['of_base']:.3f}"


def added(row: Row | None) -> str:
    """A cell: the time that a kernel adds and its GB/s."""
    if row is None:
        return DASH
    return f"{row['us']:.1f}" + (f" ({row['gb_s']:.0f})" if row["gb_s"] is not None else "")


def measured(row: Row | None, field: str, digits: int) -> str:
    """A cell: one number of a row, if it was measured before the run was broken off."""
    return DASH if row is None or row[field] is None else f"{row[field]:.{digits}f}"


def throughput(row: Row | None) -> str:
    """A cell: tokens a second when every forward is begun ahead, and their share of those of the graph alone."""
    if row is None:
        return DASH
    return f"{1e6 * row['tokens'] / row['ahead_us']:.0f} ({row['graph_us'] / row['ahead_us']:.0%})"


def read_megabytes(row: Row | None) -> str:
    """A cell: what a forward read from DRAM, and that over what it must."""
    if row is None or (over := over_floor(row)) is None:
        return DASH
    return f"{row['dram_read_bytes'] * 1e-6:.1f} ({over:.3f})"


def dram_share(row: Row | None) -> str:
    """A cell: how fast a kernel read from DRAM, and how much of DRAM's peak it used."""
    if row is None or row["dram_read_bytes"] is None or not row["time_us"]:
        return DASH
    share = DASH if row["dram_pct"] is None else f"{row['dram_pct']:.0f}%"
    return f"{row['dram_read_bytes'] / row['time_us'] * 1e-6:.2f} ({share})"
