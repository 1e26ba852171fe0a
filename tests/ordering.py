"""Which edges of a captured graph order anything: those that no path of other edges makes up for."""

from moelet.graphs.hazards import Edge, Topology


def ordering_edges(topology: Topology) -> list[Edge]:
    """The edges whose two ends nothing else joins; the rest follow from them."""
    return [edge for edge in topology.edges if edge.target not in reached(topology.without(edge), edge.source)]


def reached(topology: Topology, start: int) -> set[int]:
    """The nodes that a path of edges leads to from ``start``."""
    found, todo = {start}, [start]
    while todo:
        node = todo.pop()
        targets = {edge.target for edge in topology.edges if edge.source == node} - found
        found |= targets
        todo += targets
    return found


def labelled(topology: Topology, edges: list[Edge]) -> set[tuple[str, str]]:
    """``edges`` by the labels of their ends."""
    return {(topology.nodes[edge.source].label, topology.nodes[edge.target].label) for edge in edges}
