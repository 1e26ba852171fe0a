"""Captures and replays on a real GPU: the bits are those of plain arithmetic however branches are delayed."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import pytest
import torch
from torch import Tensor

from declarations import false_declarations
from gpu_kernels import COUNT, arena, device, events, scaled_sum, sources, step, streams, values
from moelet.graphs.arena import Arena
from moelet.graphs.capture import CapturedGraph, capture
from moelet.graphs.driver import DriverError, call, driver
from moelet.graphs.hazards import Edge, EdgeKind, Topology, Work, find_hazards
from moelet.graphs.kernel import Kernel
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer, copy_to_device, copy_to_host
from moelet.graphs.streams import Events, Streams
from moelet.layer.errors import EngineError

pytest.importorskip("cuda.bindings.driver")

CYCLES = 400_000  # about 0.2 ms: long beside every kernel here


def forked_capture(
    kernel: Kernel,
    arena: Arena,
    streams: Streams,
    events: Events,
    delays: tuple[int, int] = (0, 0),
    early: bool = False,
) -> CapturedGraph:
    main, side = streams.main, streams.side
    gemm = step(kernel, arena, main, "x zero gate_up", 3.0, delays[0])
    shrink = step(kernel, arena, side, "x zero h", 0.5, delays[1])
    expand = step(kernel, arena, side, "h zero delta", 0.25, delays[1], early)
    activation = step(kernel, arena, main, "gate_up delta act", 2.0, 0, early)

    def record() -> None:
        events.forked.record(main)
        side.wait(events.forked)
        shrink.launch()
        expand.launch()
        gemm.launch()
        events.lora_ready.record(side)
        main.wait(events.lora_ready)
        activation.launch()

    return capture(streams, record, "forked")


def truth(x: Tensor) -> Tensor:
    """Powers of two and one 3 whose product with 24-bit values rounds once, then one sum: the bits are fixed but for
    a fused multiply-add, which float64 shows."""
    gate_up, delta = (x.double() * 3.0).float(), x * 0.125
    return (gate_up.double() * 2.0 + delta.double()).float()


@pytest.mark.gpu
def test_the_captured_graph_is_the_one_drawn(
    scaled_sum: Kernel, arena: Arena, streams: Streams, events: Events
) -> None:
    graph = forked_capture(scaled_sum, arena, streams, events)
    topology = graph.topology()
    place = {node.label: index for index, node in enumerate(topology.nodes)}
    drawn = [("h", "delta"), ("gate_up", "act"), ("delta", "act")]
    assert set(topology.edges) == {Edge(place[a], place[b]) for a, b in drawn}
    assert find_hazards(topology) == []
    for edge in topology.edges:
        assert find_hazards(topology.without(edge)) != []
    assert Topology.from_json(topology.to_json()) == Topology(list(topology.nodes), list(topology.edges))
    graph.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("delays", [(0, 0), (CYCLES, 0), (0, CYCLES)], ids=["none", "main", "side"])
def test_replays_give_the_same_bits_whichever_branch_is_late(
    delays: tuple[int, int], early: bool, scaled_sum: Kernel, arena: Arena, streams: Streams, events: Events
) -> None:
    graph = forked_capture(scaled_sum, arena, streams, events, delays, early)
    assert find_hazards(graph.topology()) == []
    graph.release_template()
    for seed in range(20):
        arena.write("x", values(seed))
        for _ in range(5):
            graph.launch(streams.main)
        streams.main.synchronize()
        assert torch.equal(arena.read("act"), truth(values(seed)))
    graph.destroy()


@pytest.mark.gpu
def test_a_programmatic_chain_is_captured_as_one_and_is_in_order(
    scaled_sum: Kernel, arena: Arena, streams: Streams
) -> None:
    chain = ["x zero h", "h zero delta", "delta zero act", "act h gate_up"]
    steps = [step(scaled_sum, arena, streams.main, names, 2.0, CYCLES // 4, early=True) for names in chain]
    graph = capture(streams, lambda: [one.launch() for one in steps] and None, "chain")
    topology = graph.topology()
    assert [node.label for node in topology.nodes] == ["h", "delta", "act", "gate_up"]
    assert list(topology.edges) == [Edge(i, i + 1, EdgeKind.PROGRAMMATIC) for i in range(3)]
    assert find_hazards(topology) == []
    deaf = [Work(node.label, node.reads, node.writes, waits=False) for node in topology.nodes]
    assert find_hazards(Topology(deaf, topology.edges)) != []
    for _ in range(20):
        graph.launch(streams.main)
    streams.main.synchronize()
    assert torch.equal(arena.read("gate_up"), values(0) * 18.0)
    graph.destroy()


@pytest.mark.gpu
def test_declarations_are_tried_against_the_kernels(scaled_sum: Kernel, arena: Arena, streams: Streams) -> None:
    honest = step(scaled_sum, arena, streams.main, "x zero h", 2.0)
    assert false_declarations([honest], arena) == []
    liar = step(scaled_sum, arena, streams.main, "x h delta", 2.0)
    liar.work = Work("liar", frozenset({"x"}), frozenset({"act"}))
    assert false_declarations([liar], arena) == ["liar writes delta, which it does not declare"]
    liar.work = Work("liar", frozenset({"x"}), frozenset({"delta"}))
    assert false_declarations([liar], arena) == ["liar reads what it does not declare: delta differs"]


@pytest.mark.gpu
def test_a_graph_keeps_the_arguments_it_was_captured_with(scaled_sum: Kernel, arena: Arena, streams: Streams) -> None:
    launch = step(scaled_sum, arena, streams.main, "x zero act", 2.0)
    graph = capture(streams, launch.launch)
    launch.set("factor", 8.0)
    graph.launch(streams.main)
    streams.main.synchronize()
    assert torch.equal(arena.read("act"), values(0) * 2.0)
    graph.destroy()


@pytest.mark.gpu
def test_declared_copies_and_fills_are_nodes(scaled_sum: Kernel, arena: Arena, streams: Streams) -> None:
    pinned = PinnedBuffer(2 * COUNT * 4)
    source, result = (pinned.tensor(torch.float32, (COUNT,), offset) for offset in (0, COUNT * 4))
    source.copy_(values(5))
    launch = step(scaled_sum, arena, streams.main, "x zero act", 2.0)
    read, written = Work("in", writes=frozenset({"x"})), Work("out", reads=frozenset({"act"}))

    def record() -> None:
        copy_to_device(arena.pointer("x"), pinned.pointer, COUNT * 4, streams.main, read)
        launch.launch()
        copy_to_host(pinned.pointer + COUNT * 4, arena.pointer("act"), COUNT * 4, streams.main, written)

    graph = capture(streams, record)
    assert [(node.kind, node.work.label) for node in graph.nodes()] == [
        ("memcpy", "in"),
        ("kernel", "act"),
        ("memcpy", "out"),
    ]
    graph.launch(streams.main)
    streams.main.synchronize()
    assert torch.equal(result, values(5) * 2.0)
    graph.destroy()
    del source, result
    pinned.close()


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_streams_usable(
    scaled_sum: Kernel, arena: Arena, streams: Streams, events: Events
) -> None:
    launch = step(scaled_sum, arena, streams.side, "x zero h", 2.0)

    def unjoined() -> None:
        events.forked.record(streams.main)
        streams.side.wait(events.forked)
        launch.launch()

    with pytest.raises(DriverError, match="UNJOINED"):
        capture(streams, unjoined)
    with pytest.raises(EngineError, match="without declaring its buffers"):
        capture(streams, lambda: copy_to_device(arena.pointer("x"), arena.pointer("x"), 4, streams.main))
    with pytest.raises(EngineError, match="has not joined the capture"):
        capture(streams, launch.launch)
    with pytest.raises(DriverError):
        capture(streams, lambda: DeviceBuffer(1 << 20).close())
    assert not any(int(call(driver.cuStreamIsCapturing, stream.handle)) for stream in streams)
    streams.synchronize()
    graph = forked_capture(scaled_sum, arena, streams, events)
    graph.launch(streams.main)
    streams.main.synchronize()
    assert torch.equal(arena.read("act"), truth(values(0)))
    graph.destroy()
