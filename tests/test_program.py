"""The plans over a driver of plain Python: what is launched in which order, and what each event is needed for."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from fake_layer import FakeLayer, parameters
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.driver import DriverError
from moelet.graphs.hazards import EdgeKind, Topology, find_hazards
from moelet.graphs.pool import Variant
from moelet.graphs.program import Plan
from moelet.graphs.streams import Event, Stream
from moelet.layer.errors import EngineError
from moelet.layer.spec import LayerSpec
from ordering import labelled, ordering_edges
from pointers import pointed_at
from random_layers import GROUPED_SPEC, SHARED_SPEC, SPEC

pytest.importorskip("cuda.bindings.driver")

TOKENS = 24
FEW, MANY = 8, 200
"""Tokens that are direct where their top-k is sent, and those whose products are kernels of their own: too many of each
expert for one kernel, and too few for wide GEMMs (``test_wide.py``)."""
SPECS = {
    "plain": SPEC,
    "gated shared": SHARED_SPEC,
    "grouped": GROUPED_SPEC,
    "slice": replace(SHARED_SPEC, num_local_experts=2, local_expert_offset=3),
    "lone": replace(SPEC, intermediate_size=200),  # without adapters few tokens, of 96 row tiles, have two kernels
}

SINGLE_STREAM = """
main launches lora_shrink of gate_up
main launches lora_expand of gate_up
main launches gate_up_gemm
main launches activation
main launches down_gemm
main launches lora_shrink of down
main launches lora_expand of down
main launches finalize
"""
TWO_STREAM = """
main records forked
side waits forked
side launches lora_shrink of gate_up
side launches lora_expand of gate_up
main launches gate_up_gemm
side records lora_ready
main waits lora_ready
main launches activation
main launches down_gemm
main launches lora_shrink of down
main launches lora_expand of down
main launches finalize
"""
TWO_STREAM_OVERLAP_DOWN = """
main records forked
side waits forked
side launches lora_shrink of gate_up
side launches lora_expand of gate_up
main launches gate_up_gemm
side records lora_ready
main waits lora_ready
main launches activation
main records activation_ready
side waits activation_ready
side launches lora_shrink of down
side launches lora_expand of down
main launches down_gemm
main records gemm2_done
side waits gemm2_done
side launches finalize
side records joined
main waits joined
"""
FUSED = """
main launches expert_mlp
main launches finalize
"""
ONE_BY_ONE = """
main launches lora_shrink of gate_up
main launches gate_up_gemm
main launches lora_shrink of down
main launches down_gemm
main launches finalize
"""
LORA_STEPS = {
    Plan.SINGLE_STREAM: SINGLE_STREAM,
    Plan.TWO_STREAM: TWO_STREAM,
    Plan.TWO_STREAM_OVERLAP_DOWN: TWO_STREAM_OVERLAP_DOWN,
}
VARIANTS = [Variant(*each) for each in product((FEW, TOKENS, MANY), RoutingInput, (False, True))]


def waited_for(trace: list[str]) -> list[str]:
    """The steps less the records that nobody waits for: those order nothing."""
    waits = {step.split(" waits ")[1] for step in trace if " waits " in step}
    return [step for step in trace if " records " not in step or step.split(" records ")[1] in waits]


def steps(plan: Plan, variant: Variant, spec: LayerSpec, *, apart: bool = False) -> list[str]:
    """What a plan runs where, as DESIGN's table draws it."""
    gate = variant.routing is RoutingInput.GATE or (spec.shared_gated and spec.holds_shared_experts)
    routing = ["main launches gate"] * gate + ["main launches route"] * (variant.routing is not RoutingInput.TOPK)
    fused = plan is Plan.FUSED or not variant.lora
    direct = fused and not apart and (variant.num_tokens, variant.routing) == (FEW, RoutingInput.TOPK)
    one_by_one = apart or variant.num_tokens == MANY or (direct and spec is SPECS["lone"] and not variant.lora)
    rest = (ONE_BY_ONE if one_by_one else FUSED) if fused else LORA_STEPS[plan]
    lines = [line for line in rest.split("\n")[1:-1] if variant.lora or "lora" not in line]
    gathers = not (fused and (direct or not one_by_one))
    return [*routing, "main launches sort", *["main launches gather"] * gathers, *lines]


@pytest.fixture(params=SPECS)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeLayer:
    return FakeLayer(monkeypatch, SPECS[request.param], (FEW, TOKENS, MANY))


def topology_of(layer: FakeLayer, plan: Plan, variant: Variant) -> Topology:
    graph = layer.pool.build(variant, plan, captured=True).graph
    assert graph is not None
    return graph.topology()


@pytest.mark.parametrize("plan", Plan)
def test_every_plan_runs_its_steps_in_order(plan: Plan, layer: FakeLayer) -> None:
    for variant in VARIANTS:
        program = layer.pool.build(variant, plan, captured=False).program
        assert waited_for(layer.trace(program)) == steps(plan, variant, layer.spec)


def test_without_adapters_no_plan_launches_lora(layer: FakeLayer) -> None:
    program = layer.pool.build(Variant(TOKENS, RoutingInput.TOPK, False), Plan.TWO_STREAM, captured=False).program
    assert program.plan is Plan.FUSED
    assert not [launch.label for launch in program.launches if "lora" in launch.label or launch.label == "activation"]


def test_a_delay_spins_before_every_kernel_of_its_stream(layer: FakeLayer) -> None:
    variant, plan = Variant(TOKENS, RoutingInput.GATE, True), Plan.TWO_STREAM_OVERLAP_DOWN
    late = layer.trace(layer.pool.build(variant, plan, captured=False, delays={"side": 7}).program)
    side = [step for step in late if step.startswith("side launches")]
    assert side[::2] == ["side launches spin"] * 5
    assert [step for step in late if not step.endswith(" spin")] == layer.trace(
        layer.pool.build(variant, plan, captured=False).program
    )


@pytest.mark.parametrize("plan", Plan)
def test_no_plan_has_a_hazard_and_every_edge_is_needed(plan: Plan, layer: FakeLayer) -> None:
    for variant in VARIANTS:
        topology = topology_of(layer, plan, variant)
        assert find_hazards(topology) == []
        ordering = ordering_edges(topology)
        assert len(ordering) >= len(topology.nodes) - 1
        for edge in ordering:
            assert find_hazards(topology.without(edge)) != [], labelled(topology, [edge])


def test_the_overlap_joins_where_design_draws_it(layer: FakeLayer) -> None:
    topology = topology_of(layer, Plan.TWO_STREAM_OVERLAP_DOWN, Variant(TOKENS, RoutingInput.TOPK, True))
    between_streams = {
        ("gather", "lora_shrink of gate_up"),
        ("lora_expand of gate_up", "activation"),
        ("activation", "lora_shrink of down"),
        ("down_gemm", "finalize"),
    }
    assert between_streams <= labelled(topology, ordering_edges(topology))
    assert ("lora_shrink of down", "down_gemm") not in labelled(topology, list(topology.edges))


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_the_fused_plan_is_one_chain_of_programmatic_launches(layer: FakeLayer, lora: bool) -> None:
    for variant in VARIANTS:
        topology = topology_of(layer, Plan.FUSED, replace(variant, lora=lora))
        labels = [node.label for node in topology.nodes]
        chain = list(pairwise(labels[labels.index("sort") :]))
        programmatic = [edge for edge in topology.edges if edge.kind is EdgeKind.PROGRAMMATIC]
        assert [(labels[edge.source], labels[edge.target]) for edge in programmatic] == chain
        assert len(topology.edges) == len(labels) - 1


HOLDING = {
    (TOKENS, False): {"expert_mlp": {"places"}},
    (TOKENS, True): {"expert_mlp": {"places"}},
    (MANY, False): {"gather": {"tiles", "num_tiles", "places"}},
    (MANY, True): {
        **{"gather": {"groups", "num_groups"}, "lora_shrink of gate_up": {"tokens"}},
        "lora_shrink of down": {"act", "tickets"},
    },
}
"""What a launch behind each of these reads before it waits, by tokens, with LoRA and without."""


@pytest.mark.parametrize(("tokens", "lora"), HOLDING)
def test_only_these_must_hold(layer: FakeLayer, tokens: int, lora: bool) -> None:
    """The kernel behind one reads before it waits what had been made before that one let it start."""
    topology = topology_of(layer, Plan.FUSED, Variant(tokens, RoutingInput.TOPK, lora))
    for index, node in enumerate(topology.nodes):
        nodes = [*topology.nodes[:index], replace(node, holds=False), *topology.nodes[index + 1 :]]
        found = {hazard.buffer for hazard in find_hazards(replace(topology, nodes=nodes))}
        assert found == HOLDING[tokens, lora].get(node.label, set()), node.label


@pytest.mark.parametrize(("tokens", "rank"), [(9, 40), (24, 8), (65, 40)])
def test_adapters_of_any_rank_are_shrunk_beside_the_products(
    tokens: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FakeLayer(monkeypatch, replace(SPEC, num_experts=64), (tokens,), rank=rank)
    topology = topology_of(layer, Plan.FUSED, Variant(tokens, RoutingInput.TOPK, True))
    assert [node.label for node in topology.nodes] == ["sort", "expert_mlp", "finalize"]
    assert find_hazards(topology) == []


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_a_direct_gemm_must_hold(layer: FakeLayer, lora: bool) -> None:
    """It starts beside the sort, and what comes behind it reads what the sort made before it waits."""
    topology = topology_of(layer, Plan.FUSED, Variant(FEW, RoutingInput.TOPK, lora))
    hasty = [replace(node, holds=node.label == "sort") for node in topology.nodes]
    early = {"tiles", "num_tiles"} if layer.spec is SPECS["lone"] and not lora else {"places"}
    assert {hazard.buffer for hazard in find_hazards(replace(topology, nodes=hasty))} >= early


def test_few_tokens_can_be_sorted_as_many_are(layer: FakeLayer) -> None:
    variant = Variant(FEW, RoutingInput.TOPK, True)
    program = layer.pool.build(variant, Plan.FUSED, captured=False, apart=True).program
    assert waited_for(layer.trace(program)) == steps(Plan.FUSED, variant, layer.spec, apart=True)


def skip_waits(monkeypatch: pytest.MonkeyPatch, skipped: str) -> None:
    wait = Stream.wait

    def some_waits(stream: Stream, event: Event) -> None:
        if event.name != skipped:
            wait(stream, event)

    monkeypatch.setattr(Stream, "wait", some_waits)


@pytest.mark.parametrize(
    ("plan", "event"),
    [
        (Plan.TWO_STREAM, "forked"),
        (Plan.TWO_STREAM, "lora_ready"),
        (Plan.TWO_STREAM_OVERLAP_DOWN, "forked"),
        (Plan.TWO_STREAM_OVERLAP_DOWN, "joined"),
    ],
)
def test_a_wait_that_forks_or_joins_cannot_be_left_out(
    plan: Plan, event: str, layer: FakeLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waits(monkeypatch, event)
    with pytest.raises((EngineError, DriverError), match=r"UNJOINED|has not joined the capture"):
        topology_of(layer, plan, Variant(TOKENS, RoutingInput.TOPK, True))


@pytest.mark.parametrize(
    ("event", "buffer"),
    [("lora_ready", "gate_up_delta"), ("activation_ready", "act"), ("gemm2_done", "down_sums")],
)
def test_a_wait_left_out_of_the_overlap_is_a_hazard(
    event: str, buffer: str, layer: FakeLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waits(monkeypatch, event)
    for routing in RoutingInput:
        topology = topology_of(layer, Plan.TWO_STREAM_OVERLAP_DOWN, Variant(TOKENS, routing, True))
        assert buffer in {hazard.buffer for hazard in find_hazards(topology)}


ONE_STREAM = (Plan.FUSED, Plan.SINGLE_STREAM)
"""Plans that between them make every launch."""


@pytest.mark.parametrize("plan", ONE_STREAM)
def test_launches_declare_the_buffers_they_are_given(layer: FakeLayer, plan: Plan) -> None:
    for variant in VARIANTS:
        runnable = layer.pool.build(variant, plan, captured=False)
        for launch in runnable.program.launches:
            given = pointed_at(launch, runnable.arena)
            assert given <= launch.reads | launch.writes, launch.label
            assert launch.writes <= given, launch.label


@pytest.mark.parametrize("plan", ONE_STREAM)
def test_arguments_are_the_kernels_parameters_in_their_order(layer: FakeLayer, plan: Plan) -> None:
    for variant in VARIANTS:
        for launch in layer.pool.build(variant, plan, captured=False).program.launches:
            assert list(launch.arguments.arguments) == [name for _, name in parameters(launch.kernel.name)]
