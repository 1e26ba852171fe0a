"""The newest results of each shape, and what peers took, for tables and plots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import RESULTS, Row, read

PEERS = Path(__file__).with_name("peers.json")


@dataclass(frozen=True, slots=True)
class Newest:
    """The rows of one shape out of the newest report of a kind that has any, peers' rows apart."""

    report: Mapping[str, Any]
    rows: Sequence[Row]
    peers: Sequence[Row]

    @property
    def day(self) -> str:
        """When it was measured."""
        return str(self.report["date"])[:10]

    @property
    def tokens(self) -> list[int]:
        """The token counts measured, ascending."""
        return sorted({row["tokens"] for row in self.rows})


def reports(folder: Path = RESULTS) -> Iterator[Mapping[str, Any]]:
    """Every report of ``moelet bench`` in ``folder``, the newest first. Raises ``ConfigurationError`` for a file there
    that cannot be read."""
    found = [read(path) for path in folder.glob("*.json")]
    named = [report for report in found if "kind" in report and report.get("rows")]
    yield from sorted(named, key=lambda report: str(report["date"]), reverse=True)


def newest(
    kind: str, shape: str, routing: str = "uniform", folder: Path = RESULTS, *, ranks: bool = False
) -> Newest | None:
    """The newest right rows of ``shape`` under ``routing``: of a report with several LoRA ranks if ``ranks``, else of
    one with one at most; of one day's reports the one with the most token counts. None where there are none."""

    def of_shape(rows: Sequence[Row]) -> list[Row]:
        fitting = [r for r in rows if (r["shape"], r.get("routing", routing)) == (shape, routing)]
        return [r for r in fitting if not r.get("wrong")]

    found: list[Newest] = []
    for report in reports(folder):
        rows = of_shape(report["rows"]) if report["kind"] == kind else []
        if rows and ranks == (len({row["rank"] for row in rows if row.get("rank")}) > 1):
            found.append(Newest(report, rows, of_shape(report.get("peers", []))))
    return max(found, key=lambda one: (one.day, len(one.tokens)), default=None)


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
