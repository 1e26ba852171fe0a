"""Order on a real GPU: real captured graphs have no hazard, declarations are true, and a late branch changes no bit."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from itertools import pairwise, product

import pytest
import torch

from declarations import false_declarations
from decode_cases import SMALL, SPECS, batch_of, some_adapters
from gpu_engines import Gpu, GpuLayer, gpu, same_bits
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.hazards import EdgeKind, Topology, find_hazards
from moelet.graphs.program import Plan
from ordering import labelled, ordering_edges
from random_layers import random_batch

pytestmark = pytest.mark.gpu

SHAPES = (1, 3, 8, 64, 80)
CYCLES = 150_000
"""About a tenth of a millisecond: long beside every kernel here."""
PLANS = list(Plan)
VARIANTS = list(product(RoutingInput, (False, True)))


@pytest.fixture(params=SPECS)
def layer(gpu: Gpu, request: pytest.FixtureRequest) -> GpuLayer:
    layer = gpu.layer(SPECS[request.param])
    layer.install(some_adapters(layer.spec))
    return layer


def topology_of(layer: GpuLayer, shape: int, plan: Plan, routing: RoutingInput, lora: bool) -> Topology:
    graph = layer.runnable(shape, plan, routing, lora=lora, captured=True).graph
    assert graph is not None
    return graph.topology()


@pytest.mark.parametrize("plan", PLANS)
def test_no_captured_graph_has_a_hazard_and_every_edge_is_needed(layer: GpuLayer, plan: Plan) -> None:
    for shape, (routing, lora) in product(SHAPES, VARIANTS):
        topology = topology_of(layer, shape, plan, routing, lora)
        assert find_hazards(topology) == []
        ordering = ordering_edges(topology)
        assert len(ordering) >= len(topology.nodes) - 1
        for edge in ordering:
            assert find_hazards(topology.without(edge)) != [], labelled(topology, [edge])


def test_the_driver_captures_the_plan_that_was_drawn(layer: GpuLayer) -> None:
    topology = topology_of(layer, 8, Plan.TWO_STREAM_OVERLAP_DOWN, RoutingInput.TOPK, True)
    drawn = {
        ("sort", "gather"),
        ("gather", "lora_shrink of gate_up"),
        ("lora_shrink of gate_up", "lora_expand of gate_up"),
        ("gather", "gate_up_gemm"),
        ("gate_up_gemm", "activation"),
        ("lora_expand of gate_up", "activation"),
        ("activation", "down_gemm"),
        ("activation", "lora_shrink of down"),
        ("lora_shrink of down", "lora_expand of down"),
        ("lora_expand of down", "finalize"),
        ("down_gemm", "finalize"),
    }
    gate = {("gate", "sort")} if layer.spec.shared_gated else set()
    assert labelled(topology, ordering_edges(topology)) == drawn | gate


def test_programmatic_edges_are_captured_as_such(layer: GpuLayer) -> None:
    """Else the rules for them would never have been tried on a real graph."""
    for lora in (False, True):
        topology = topology_of(layer, 8, Plan.FUSED, RoutingInput.TOPK, lora)
        labels = [topology.nodes[node].label for node in topology.order()]
        programmatic = [edge for edge in topology.edges if edge.kind is EdgeKind.PROGRAMMATIC]
        assert labelled(topology, programmatic) == set(pairwise(labels[labels.index("sort") :]))


@pytest.mark.parametrize("plan", [None, Plan.FUSED, Plan.SINGLE_STREAM], ids=["base", "fused", "apart"])
@pytest.mark.parametrize("routing", RoutingInput)
def test_launches_touch_what_they_declare_and_nothing_else(gpu: Gpu, routing: RoutingInput, plan: Plan | None) -> None:
    layer, lora = gpu.layer(SMALL), plan is not None
    layer.install(some_adapters(SMALL))
    for shape in (2, 8, 16):
        runnable = layer.runnable(shape, plan or Plan.FUSED, routing, lora=lora)
        layer.forward(runnable, batch_of(SMALL, max(shape - 3, 1), routing, lora=lora))
        assert false_declarations(runnable.program.launches, runnable.arena) == []


@pytest.mark.parametrize("late", [("main",), ("side",), ("main", "side")], ids="+".join)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_a_late_branch_changes_no_bit(layer: GpuLayer, captured: bool, late: tuple[str, ...]) -> None:
    for plan, shape, routing in product(PLANS, (3, 64), (RoutingInput.TOPK, RoutingInput.GATE)):
        batch = batch_of(layer.spec, shape, routing, lora=True)
        wanted = layer.eager(batch)
        delays = dict.fromkeys(late, CYCLES)
        runnable = layer.runnable(shape, plan, routing, captured=captured, delays=delays)
        if runnable.graph is not None:
            assert find_hazards(runnable.graph.topology()) == []
        for _ in range(2):
            layer.poison()
            assert same_bits(layer.forward(runnable, batch), wanted), (plan, shape, routing)


def test_a_delay_shows_a_wait_that_is_missing(gpu: Gpu) -> None:
    """The overlapped program less its joins: with a late side branch the activation is made without the delta.

    What comes out then is NaN, for nothing has been written where the delta should be; so delays do show what they
    are there to show.
    """
    layer, main = gpu.layer(SMALL), gpu.streams.main
    layer.install(some_adapters(SMALL))
    batch = random_batch(SMALL, 64, seed=1, slots=[0])
    runnable = layer.runnable(64, Plan.TWO_STREAM_OVERLAP_DOWN, delays={"side": 10 * CYCLES})
    wanted = layer.eager(batch)
    layer.poison()
    layer.send(runnable, batch)
    gpu.streams.synchronize()
    for launch in runnable.program.launches:
        launch.launch()  # on its own stream, which waits for nothing
        if launch.label == "gather":
            main.synchronize()
    gpu.streams.synchronize()
    assert layer.staging.receive(layer.transfer(runnable, 64), main).isnan().any()
    assert same_bits(layer.forward(runnable, batch), wanted)


def test_plans_agree_where_every_token_has_its_own_adapter(layer: GpuLayer) -> None:
    """The most groups that a batch can make, each of a few rows."""
    batch = random_batch(layer.spec, 64, seed=9, slots=[0, 1, 2])
    wanted = layer.eager(batch)
    for plan in PLANS:
        runnable = layer.runnable(64, plan, captured=True)
        outputs = torch.stack([layer.forward(runnable, batch) for _ in range(20)])
        assert same_bits(outputs, wanted.expand(outputs.shape).contiguous())
