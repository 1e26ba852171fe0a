"""Which nodes of a captured graph may touch a buffer at the same time: a proof of order, or the pairs without one.

Every launch declares the buffers it reads and writes. The order of two nodes follows from the edges:

* a full edge ``u -> v``: v starts after u has completed;
* a programmatic edge ``u -> v`` (programmatic dependent launch): v starts once u has *started*. Only if v's kernel
  waits (``griddepcontrol.wait``) do its accesses come after u has completed; and u's completion says nothing of u's
  own predecessors unless u waited for them, so one kernel that does not wait breaks the chain for all behind it.
  Where u lets v start only after its own wait, what u waited for has completed before v starts: v may touch that
  early, before it waits itself.

Pure Python: it needs neither a GPU nor a driver.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch, copy or fill does to named buffers.

    ``waits``: whether a kernel executes ``griddepcontrol.wait`` in every block that touches a buffer which other nodes
    touch too, those of ``early`` apart, before it does, and in one block at least. It matters only behind a
    programmatic edge. ``early``: the buffers it touches before it waits. ``holds``: whether a kernel that waits does so
    before it lets dependents start (``griddepcontrol.launch_dependents``).
    """

    label: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    waits: bool = False
    early: frozenset[str] = frozenset()
    holds: bool = False


class EdgeKind(StrEnum):
    """How much an edge orders."""

    FULL = "full"
    PROGRAMMATIC = "programmatic"


@dataclass(frozen=True, slots=True)
class Edge:
    """``target`` depends on ``source``, both indices of nodes."""

    source: int
    target: int
    kind: EdgeKind = EdgeKind.FULL


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two nodes that both touch ``buffer``, at least one of them writing, in no proven order."""

    first: int
    second: int
    buffer: str
    kind: str
    labels: tuple[str, str]

    def __str__(self) -> str:
        first, second = self.labels
        return f"{first} [{self.first}] and {second} [{self.second}]: unordered {self.kind} of {self.buffer}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes and edges of one captured graph. Raises ``ValueError`` for an edge to nowhere or a cycle."""

    nodes: Sequence[Work]
    edges: Sequence[Edge]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for edge in self.edges:
            if not (0 <= edge.source < len(self.nodes) and 0 <= edge.target < len(self.nodes)):
                raise ValueError(f"edge {edge.source} -> {edge.target} leaves the {len(self.nodes)} nodes")
        self.order()

    def incoming(self) -> list[list[Edge]]:
        """The edges that end at each node."""
        result: list[list[Edge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            result[edge.target].append(edge)
        return result

    def order(self) -> list[int]:
        """The nodes in an order that respects every edge."""
        missing = [len(edges) for edges in self.incoming()]
        outgoing: list[list[int]] = [[] for _ in self.nodes]
        for edge in self.edges:
            outgoing[edge.source].append(edge.target)
        ready = [node for node, count in enumerate(missing) if count == 0]
        for node in ready:  # grows while it is walked
            for target in outgoing[node]:
                missing[target] -= 1
                if missing[target] == 0:
                    ready.append(target)
        if len(ready) != len(self.nodes):
            raise ValueError("the edges form a cycle")
        return ready

    def without(self, edge: Edge) -> "Topology":
        """The same graph less one edge, for tests that break an order on purpose."""
        return replace(self, edges=[other for other in self.edges if other != edge])

    def to_json(self) -> str:
        """A stable text form, for topologies kept in files."""
        nodes = [
            {
                "label": n.label,
                "reads": sorted(n.reads),
                "writes": sorted(n.writes),
                "waits": n.waits,
                "early": sorted(n.early),
                "holds": n.holds,
            }
            for n in self.nodes
        ]
        edges = [[edge.source, edge.target, edge.kind.value] for edge in self.edges]
        return json.dumps({"name": self.name, "nodes": nodes, "edges": edges}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """The inverse of ``to_json``."""
        data = json.loads(text)
        nodes = [
            Work(
                n["label"], frozenset(n["reads"]), frozenset(n["writes"]), n["waits"], frozenset(n["early"]), n["holds"]
            )
            for n in data["nodes"]
        ]
        edges = [Edge(source, target, EdgeKind(kind)) for source, target, kind in data["edges"]]
        return cls(nodes, edges, data["name"])


@dataclass(frozen=True, slots=True)
class Completed:
    """For each node, the nodes that have completed before it starts, and before its first access after its wait."""

    at_start: Sequence[frozenset[int]]
    at_access: Sequence[frozenset[int]]

    def orders(self, topology: Topology, first: int, second: int, buffer: str) -> bool:
        """Whether ``first`` has completed before ``second`` touches ``buffer``."""
        early = buffer in topology.nodes[second].early
        return first in (self.at_start if early else self.at_access)[second]


def completed(topology: Topology) -> Completed:
    """What has completed when, by the rules above."""
    incoming = topology.incoming()
    at_start: dict[int, frozenset[int]] = {}
    at_access: dict[int, frozenset[int]] = {}
    for node in topology.order():
        full = [e.source for e in incoming[node] if e.kind is EdgeKind.FULL]
        programmatic = [e.source for e in incoming[node] if e.kind is EdgeKind.PROGRAMMATIC]
        at_start[node] = _union(at_access[u] | {u} for u in full) | _union(
            (at_access if topology.nodes[u].holds else at_start)[u] for u in programmatic
        )
        waited = programmatic if topology.nodes[node].waits else []
        at_access[node] = at_start[node] | _union(at_access[u] | {u} for u in waited)
    nodes = range(len(topology.nodes))
    return Completed([at_start[node] for node in nodes], [at_access[node] for node in nodes])


def find_hazards(topology: Topology) -> list[Hazard]:
    """Every pair of nodes that touch one buffer, one of them writing, in no proven order; empty: none."""
    when = completed(topology)
    return [
        Hazard(first, second, buffer, kind, (topology.nodes[first].label, topology.nodes[second].label))
        for first, second in combinations(range(len(topology.nodes)), 2)
        for buffer, kind in _conflicts(topology.nodes[first], topology.nodes[second])
        if not (when.orders(topology, first, second, buffer) or when.orders(topology, second, first, buffer))
    ]


def _conflicts(first: Work, second: Work) -> list[tuple[str, str]]:
    both_write = first.writes & second.writes
    one_writes = ((first.writes & second.reads) | (first.reads & second.writes)) - both_write
    return [(name, "writes") for name in sorted(both_write)] + [(name, "read and write") for name in sorted(one_writes)]


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
