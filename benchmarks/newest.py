"""The newest results of each shape, and what peers took, for tables and plots."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelet.layer.errors import ConfigurationError

from .cells import described
from .report import RESULTS, Row, read

PEERS = Path(__file__).with_name("peers.json")


@dataclass(frozen=True, slots=True)
class Newest:
    """The right rows of one shape out of one report, peers' rows apart, with the name of the report's file.

    ``passed_over`` has a sentence for each newer report of the kind that lacks something of what this one has.
    """

    name: str
    report: Mapping[str, Any]
    rows: Sequence[Row]
    peers: Sequence[Row]
    passed_over: Sequence[str] = ()

    @property
    def tokens(self) -> list[int]:
        """The token counts measured, ascending."""
        return sorted({row["tokens"] for row in self.rows})

    @property
    def measured(self) -> set[tuple[str, int]]:
        """What a table can tell apart, by name, and the token count of each; not by which plan or kernels."""
        kind = str(self.report["kind"])
        return {(_named(kind, row), row["tokens"]) for row in (*self.rows, *self.peers)}


def _named(kind: str, row: Row) -> str:
    if "server" in row:
        return f"{row['server']} of {row['clients']} clients"
    if "peer" in row:
        return str(row["peer"])
    told = described(row["rank"], row["adapters"], row.get("layout"))
    return f"{told}, {row.get('memory', 'pageable')}" if kind == "host" else told  # older results are of pageable


def reports(folder: Path = RESULTS) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every report of ``moelet bench`` in ``folder`` with the name of its file, the newest first. Raises
    ``ConfigurationError`` for a file there that cannot be read."""
    found = {path.name: read(path) for path in folder.glob("*.json")}
    named = [(name, report) for name, report in found.items() if "kind" in report and report.get("rows")]
    yield from sorted(named, key=lambda each: (str(each[1]["date"]), each[0]), reverse=True)


def newest(
    kind: str,
    shape: str,
    routing: str = "uniform",
    folder: Path = RESULTS,
    *,
    ranks: bool = False,
    file: str | None = None,
) -> Newest | None:
    """The right rows of ``shape`` under ``routing``, of the newest report that has all that was measured in the fullest
    one: of reports with several LoRA ranks if ``ranks``, else of those with one at most. None where there are none.

    ``file`` names the report instead, however full it is; raises ``ConfigurationError`` where it has no such rows.
    """

    def of_shape(rows: Sequence[Row]) -> list[Row]:
        fitting = [r for r in rows if (r["shape"], r.get("routing", routing)) == (shape, routing)]
        return [r for r in fitting if not r.get("wrong")]

    found: list[Newest] = []
    for name, report in reports(folder):
        rows = of_shape(report["rows"]) if report["kind"] == kind and file in (None, name) else []
        if rows and ranks == (len({row["rank"] for row in rows if row.get("rank")}) > 1):
            found.append(Newest(name, report, rows, of_shape(report.get("peers", []))))
    if file is not None and not found:
        several = " with several LoRA ranks" if ranks else ""
        raise ConfigurationError(f"{folder / file} has no right rows of {kind}, {shape}, {routing} routing{several}")
    return _fullest(found) if found else None


def _fullest(found: Sequence[Newest]) -> Newest:
    """The first of ``found``, the newest first, that lacks nothing of the one with the most."""
    measured = [one.measured for one in found]
    most = max(measured, key=len)
    place = next(number for number, each in enumerate(measured) if each >= most)
    one = found[place]
    told = [
        f"{newer.name} is newer, but lacks what {one.name} has: {_listed(measured[place] - has)}"
        for newer, has in zip(found[:place], measured, strict=False)
    ]
    return Newest(one.name, one.report, one.rows, one.peers, told)


def _listed(lacking: Collection[tuple[str, int]]) -> str:
    """``base at T=1,4; LoRA r16 ×1 at T=4``."""
    tokens: dict[str, list[int]] = {}
    for name, count in sorted(lacking):
        tokens.setdefault(name, []).append(count)
    return "; ".join(f"{name} at T={','.join(map(str, counts))}" for name, counts in tokens.items())


@dataclass(frozen=True, slots=True)
class Published:
    """One peer's times over token counts, measured earlier by this project; ``us`` lacks what was not measured."""

    name: str
    rank: int
    adapters: int
    us: Mapping[int, float]


def published(shape: str) -> list[Published]:
    """The peers of ``shape``, as ``peers.json`` has them."""
    data = json.loads(PEERS.read_text(encoding="utf-8"))
    return [
        Published(
            series["name"],
            series["rank"],
            series["adapters"],
            {tokens: us for tokens, us in zip(data["tokens"], series["us"], strict=True) if us is not None},
        )
        for series in data["shapes"].get(shape, [])
    ]


def source() -> str:
    """Where the published times come from: ``measured …``."""
    return str(json.loads(PEERS.read_text(encoding="utf-8"))["source"])


def published_date() -> str:
    """When they were measured."""
    return str(json.loads(PEERS.read_text(encoding="utf-8"))["date"])


def best_published(shape: str, rank: int, adapters: int) -> dict[int, Published]:
    """The fastest peer of ``shape`` at each token count, with so many adapters of ``rank``."""
    best: dict[int, Published] = {}
    for peer in published(shape):
        if (peer.rank, peer.adapters) == (rank, adapters):
            for tokens, us in peer.us.items():
                if tokens not in best or us < best[tokens].us[tokens]:
                    best[tokens] = peer
    return best
