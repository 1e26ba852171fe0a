"""The hazard checker against a simulation of every possible run, and against the layer's plans with edges taken out."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelet.graphs.hazards import Edge, EdgeKind, Hazard, Topology, Work, find_hazards

FULL, EARLY = EdgeKind.FULL, EdgeKind.PROGRAMMATIC


def work(label: str, reads: str = "", writes: str = "", waits: bool = False) -> Work:
    return Work(label, frozenset(reads.split()), frozenset(writes.split()), waits)


# The layer's plans as the design draws them: main is route..finalize, side is the LoRA.
MAIN = [
    work("sort", "x topk", "map"),  # 0
    work("gate_up", "x map", "gate_up"),  # 1
    work("activation", "gate_up delta", "act"),  # 2
    work("down", "act map", "down"),  # 3
    work("finalize", "down down_delta map", "out"),  # 4
]
SIDE = [
    work("shrink", "x topk", "h"),  # 5
    work("expand", "h", "delta"),  # 6
    work("down_shrink", "act", "h2"),  # 7
    work("down_expand", "h2", "down_delta"),  # 8
]
NODES = MAIN + SIDE
OVERLAP_DOWN = Topology(
    NODES,
    [
        *[Edge(i, i + 1) for i in range(4)],
        *[Edge(5, 6), Edge(6, 2)],  # lora_ready
        *[Edge(2, 7), Edge(7, 8), Edge(8, 4)],  # activation_ready, down_lora_ready
    ],
    "two_stream_overlap_down",
)
TWO_STREAM = Topology(
    NODES,
    [Edge(0, 1), Edge(1, 2), Edge(5, 6), Edge(6, 2), Edge(2, 3), Edge(3, 7), Edge(7, 8), Edge(8, 4)],
    "two_stream",
)
SERIAL_ORDER = [0, 5, 6, 1, 2, 3, 7, 8, 4]
SINGLE_STREAM = Topology(NODES, [Edge(a, b) for a, b in pairwise(SERIAL_ORDER)], "single_stream")
PLANS = [SINGLE_STREAM, TWO_STREAM, OVERLAP_DOWN]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_the_plans_have_no_hazard(plan: Topology) -> None:
    assert find_hazards(plan) == []


@pytest.mark.parametrize(
    ("edge", "carried"),
    [
        (Edge(0, 1), "map"),
        (Edge(1, 2), "gate_up"),
        (Edge(6, 2), "delta"),
        (Edge(2, 7), "act"),
        (Edge(2, 3), "act"),
        (Edge(3, 4), "down"),
        (Edge(8, 4), "down_delta"),
        (Edge(5, 6), "h"),
        (Edge(7, 8), "h2"),
    ],
)
def test_taking_out_any_edge_of_the_overlap_is_found(edge: Edge, carried: str) -> None:
    broken = OVERLAP_DOWN.without(edge)
    assert len(broken.edges) == len(OVERLAP_DOWN.edges) - 1
    found = {hazard.buffer for hazard in find_hazards(broken)}
    assert carried in found
    assert found == brute_force_buffers(broken)


def test_a_finalize_that_stores_beside_an_expand_that_adds_is_found() -> None:
    nodes = [work("down", "act", "down"), work("finalize", "down", "out"), work("down_expand", "h2 out", "out")]
    [hazard] = find_hazards(Topology(nodes, [Edge(0, 1), Edge(0, 2)]))
    assert hazard == Hazard(1, 2, "out", "writes", ("finalize", "down_expand"))
    assert str(hazard) == "finalize [1] and down_expand [2]: unordered writes of out"
    assert find_hazards(Topology(nodes, [Edge(0, 1), Edge(1, 2)])) == []


def test_the_next_layer_overwriting_what_the_side_stream_still_reads_is_found() -> None:
    first = [work("act.0", "", "act"), work("shrink.0", "act", "h"), work("down.0", "act", "down")]
    nodes = [*first, work("act.1", "down", "act")]
    unjoined = Topology(nodes, [Edge(0, 1), Edge(0, 2), Edge(2, 3)])
    assert [(h.labels, h.buffer, h.kind) for h in find_hazards(unjoined)] == [
        (("shrink.0", "act.1"), "act", "read and write")
    ]
    assert find_hazards(Topology(nodes, [*unjoined.edges, Edge(1, 3)])) == []


def test_two_readers_need_no_order() -> None:
    assert find_hazards(Topology([work("a", "x"), work("b", "x", "y")], [])) == []


CHAIN = [work("a", "", "p", True), work("b", "p", "q", True), work("c", "p", "p", True)]


@pytest.mark.parametrize(
    ("b_waits", "c_waits", "pairs"),
    [
        (True, True, set()),
        (False, True, {(0, 1), (0, 2)}),
        (True, False, {(0, 2), (1, 2)}),
        (False, False, {(0, 1), (0, 2), (1, 2)}),
    ],
)
def test_a_programmatic_chain_orders_only_while_every_kernel_waits(
    b_waits: bool, c_waits: bool, pairs: set[tuple[int, int]]
) -> None:
    nodes = [CHAIN[0], replace(CHAIN[1], waits=b_waits), replace(CHAIN[2], waits=c_waits)]
    found = find_hazards(Topology(nodes, [Edge(0, 1, EARLY), Edge(1, 2, EARLY)]))
    assert {(hazard.first, hazard.second) for hazard in found} == pairs


def test_a_full_edge_behind_a_kernel_that_did_not_wait_does_not_reach_past_it() -> None:
    nodes = [work("a", "", "p"), work("b", "", "q", waits=False), work("c", "p", "")]
    assert [h.buffer for h in find_hazards(Topology(nodes, [Edge(0, 1, EARLY), Edge(1, 2)]))] == ["p"]
    assert find_hazards(Topology(nodes, [Edge(0, 1), Edge(1, 2)])) == []


def test_a_programmatic_successor_still_starts_after_what_its_predecessor_started_after() -> None:
    nodes = [work("a", "", "p"), work("b", "", "q"), work("c", "p", "", waits=False)]
    assert find_hazards(Topology(nodes, [Edge(0, 1), Edge(1, 2, EARLY)])) == []


def test_an_early_read_needs_what_its_predecessor_waited_for() -> None:
    sort = work("sort", "", "p", waits=True)
    gate_up = Work("gate_up", frozenset("p"), frozenset("q"), waits=True, holds=True)
    down = Work("down", frozenset("pq"), frozenset("r"), waits=True, early=frozenset("p"))
    edges = [Edge(0, 1, EARLY), Edge(1, 2, EARLY)]
    assert find_hazards(Topology([sort, gate_up, down], edges)) == []
    hasty = replace(gate_up, holds=False)
    assert [h.buffer for h in find_hazards(Topology([sort, hasty, down], edges))] == ["p"]
    assert [h.buffer for h in find_hazards(Topology([sort, down], [Edge(0, 1, EARLY)]))] == ["p"]


def test_topologies_survive_json() -> None:
    early = Topology(CHAIN, [Edge(0, 1, EARLY), Edge(1, 2)], "chain")
    for topology in (*PLANS, early):
        back = Topology.from_json(topology.to_json())
        assert (list(back.nodes), list(back.edges), back.name) == (
            list(topology.nodes),
            list(topology.edges),
            topology.name,
        )


@pytest.mark.parametrize("edges", [[Edge(0, 3)], [Edge(-1, 0)], [Edge(0, 1), Edge(1, 0)], [Edge(1, 1)]])
def test_a_graph_that_is_none_is_refused(edges: list[Edge]) -> None:
    with pytest.raises(ValueError, match=r"cycle|leaves"):
        Topology(CHAIN, edges)


def brute_force(topology: Topology) -> set[tuple[int, int, str]]:
    """Pairs that some run has touching a buffer at once, by walking every reachable state of every run.

    A node is idle (0), started and reading early (1), accessing (2) or completed (3). A run advances one node at a
    time. A kernel that holds lets dependents start once it has waited (2), another as soon as it starts (1).
    """
    incoming = topology.incoming()

    def may_advance(state: tuple[int, ...], node: int) -> bool:
        for edge in incoming[node]:
            source, before = state[edge.source], topology.nodes[edge.source]
            triggered = 2 if before.holds and before.waits else 1
            if state[node] == 0 and source < (3 if edge.kind is FULL else triggered):
                return False
            if state[node] == 1 and topology.nodes[node].waits and source < 3:
                return False
        return state[node] < 3

    def touches(state: tuple[int, ...], node: int, name: str) -> bool:
        return state[node] == 2 or (state[node] == 1 and name in topology.nodes[node].early)

    seen, todo = set(), [(0,) * len(topology.nodes)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        for node in range(len(state)):
            if may_advance(state, node):
                todo.append((*state[:node], state[node] + 1, *state[node + 1 :]))
    return {
        (a, b, name)
        for a, b in combinations(range(len(topology.nodes)), 2)
        for name in touching(topology.nodes[a], topology.nodes[b])
        if any(touches(state, a, name) and touches(state, b, name) for state in seen)
    }


def touching(first: Work, second: Work) -> set[str]:
    names = first.reads | first.writes | second.reads | second.writes
    return {
        name
        for name in names
        if (name in first.writes and name in second.reads | second.writes)
        or (name in second.writes and name in first.reads)
    }


def brute_force_buffers(topology: Topology) -> set[str]:
    return {name for _, _, name in brute_force(topology)}


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    count = draw(st.integers(1, 5))
    buffers = st.frozensets(st.sampled_from("pqr"), max_size=2)
    flags = st.booleans()
    nodes = []
    for i in range(count):
        reads = draw(buffers)
        early = draw(st.frozensets(st.sampled_from(sorted(reads)), max_size=2)) if reads else frozenset()
        nodes.append(Work(f"n{i}", reads, draw(buffers) - early, draw(flags), early, draw(flags)))
    order = draw(st.permutations(range(count)))
    kinds = st.sampled_from([None, FULL, EARLY])
    pairs = [(order[a], order[b], draw(kinds)) for a, b in combinations(range(count), 2)]
    return Topology(nodes, [Edge(a, b, kind) for a, b, kind in pairs if kind])


@settings(max_examples=150, deadline=None)
@given(topologies())
def test_the_checker_agrees_with_every_possible_run(topology: Topology) -> None:
    assert {(h.first, h.second, h.buffer) for h in find_hazards(topology)} == brute_force(topology)
