"""Captured graphs know what every node touches; what cannot be captured is refused and leaves nothing behind."""

from collections.abc import Callable

import pytest

from fake_driver import FakeDriver
from moelet.graphs.capture import CapturedGraph, capture
from moelet.graphs.compiler import Cubin, Resources
from moelet.graphs.driver import DriverError, call, driver
from moelet.graphs.hazards import Edge, EdgeKind, Work, find_hazards
from moelet.graphs.kernel import Kernel, PreparedLaunch
from moelet.graphs.memory import DeviceBuffer, copy_to_device, fill
from moelet.graphs.streams import Events, Stream, Streams
from moelet.layer.errors import EngineError, EngineFailedError

pytest.importorskip("cuda.bindings.driver")

FULL, EARLY = EdgeKind.FULL, EdgeKind.PROGRAMMATIC
CUBIN = Cubin("k", "sm_90a", b"\x7fELF", "", Resources(16, 0, 0, 0, 0), "compiled")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


@pytest.fixture
def streams(fake: FakeDriver) -> Streams:  # noqa: ARG001 (the driver must be there first)
    return Streams()


@pytest.fixture
def events(fake: FakeDriver) -> Events:  # noqa: ARG001
    return Events()


def launch(stream: Stream, label: str, reads: str, writes: str, early: bool = False) -> PreparedLaunch:
    return Kernel(CUBIN).prepare(
        grid=(1, 1, 1),
        block=(32, 1, 1),
        stream=stream,
        arguments={},
        waits=early,
        programmatic=early,
        label=label,
        reads=frozenset(reads.split()),
        writes=frozenset(writes.split()),
    )


def forked(streams: Streams, events: Events, join: bool = True) -> Callable[[], None]:
    """A GEMM on main beside a LoRA pair on side, joined before the activation."""
    buffer = DeviceBuffer(4)
    gemm = launch(streams.main, "gemm", "x", "gate_up")
    shrink = launch(streams.side, "shrink", "x", "h")
    expand = launch(streams.side, "expand", "h", "delta", early=True)
    activation = launch(streams.main, "activation", "gate_up delta", "act", early=True)

    def record() -> None:
        fill(buffer.pointer, 0, 4, streams.main, Work("clear", writes=frozenset({"x"})))
        events.forked.record(streams.main)
        streams.side.wait(events.forked)
        shrink.launch()
        gemm.launch()
        expand.launch()
        events.lora_ready.record(streams.side)
        if join:
            streams.main.wait(events.lora_ready)
        activation.launch()

    return record


def test_every_node_is_mapped_to_what_it_declared(streams: Streams, events: Events) -> None:
    graph = capture(streams, forked(streams, events), "T=4")
    nodes = graph.nodes()
    assert [(node.kind, node.work.label) for node in nodes] == [
        ("memset", "clear"),
        ("kernel", "shrink"),
        ("kernel", "gemm"),
        ("kernel", "expand"),
        ("kernel", "activation"),
    ]
    assert (nodes[4].work.reads, nodes[4].work.writes) == ({"gate_up", "delta"}, {"act"})
    assert set(graph.edges()) == {
        Edge(0, 1),
        Edge(0, 2),
        Edge(1, 3, EARLY),
        Edge(2, 4, EARLY),
        Edge(3, 4),
    }
    topology = graph.topology()
    assert topology.name == "T=4"
    assert find_hazards(topology) == []
    for edge in topology.edges:
        assert find_hazards(topology.without(edge)) != []


def test_the_same_code_runs_eagerly(streams: Streams, events: Events, fake: FakeDriver) -> None:
    record = forked(streams, events)
    eager = recorded(fake, record)
    captured = recorded(fake, lambda: capture(streams, record))
    assert eager == [name for name in captured if name in set(eager)]
    assert len(fake.launches) == 8


def recorded(fake: FakeDriver, run: Callable[[], object]) -> list[str]:
    fake.calls.clear()
    run()
    return list(fake.calls)


def test_a_graph_is_instantiated_uploaded_launched_and_destroyed(
    streams: Streams, events: Events, fake: FakeDriver
) -> None:
    graph = capture(streams, forked(streams, events))
    assert graph.footprint_bytes == 0
    graph.launch(streams.main)
    graph.release_template()
    with pytest.raises(EngineError, match="the template of graph graph was released"):
        graph.nodes()
    graph.launch(streams.main)
    for _ in range(2):
        graph.destroy()
    ours = [name for name in fake.calls if name.startswith("cuGraph") and "Get" not in name]
    assert ours == [
        "cuGraphInstantiate",
        "cuGraphUpload",
        "cuGraphLaunch",
        "cuGraphDestroy",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
    ]


def test_nothing_is_created_while_capturing_or_replaying(streams: Streams, events: Events, fake: FakeDriver) -> None:
    record = forked(streams, events)
    fake.calls.clear()
    graph = capture(streams, record)
    graph.launch(streams.main)
    forbidden = {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuModuleLoadData"}
    assert not forbidden & set(fake.calls)
    begin, end = fake.calls.index("cuStreamBeginCapture"), fake.calls.index("cuStreamEndCapture")
    assert "cuStreamSynchronize" not in fake.calls[begin:end]


def refuses(streams: Streams, record: Callable[[], None], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        capture(streams, record)
    assert all(stream.tracer is None and not int(call(driver.cuStreamIsCapturing, stream.handle)) for stream in streams)


def test_a_side_stream_that_never_joins_is_refused(streams: Streams, events: Events) -> None:
    message = "STREAM_CAPTURE_UNJOINED.*a side stream was forked into the capture and never joined back"
    refuses(streams, forked(streams, events, join=False), DriverError, message)
    assert len(capture(streams, forked(streams, events)).nodes()) == 5


def test_work_that_declares_nothing_is_refused(streams: Streams, fake: FakeDriver) -> None:
    refuses(
        streams,
        lambda: copy_to_device(0, 0, 4, streams.main),
        EngineError,
        "an operation was captured on stream main without declaring its buffers",
    )
    assert "cuGraphDestroy" in fake.calls


def test_work_outside_the_capture_is_refused(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "lonely was put on stream side, which has not joined the capture"
    refuses(streams, launch(streams.side, "lonely", "", "x").launch, EngineError, message)
    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", lambda *_: (driver.CUresult.CUDA_SUCCESS,))
    work = Work("adapter")
    message = "adapter was put on the copy stream, which is never captured"
    refuses(streams, lambda: copy_to_device(0, 0, 4, streams.copy, work), EngineError, message)


def test_what_launch_code_raises_comes_through(streams: Streams, fake: FakeDriver) -> None:
    def fail() -> None:
        launch(streams.main, "first", "", "x").launch()
        raise KeyError("mine")

    refuses(streams, fail, KeyError, "mine")
    assert "cuGraphInstantiate" not in fake.calls


@pytest.mark.parametrize("kind", ["MEM_ALLOC", "HOST", "KERNEL"])
def test_a_node_that_nobody_declared_is_refused(kind: str, streams: Streams, fake: FakeDriver) -> None:
    message = f"graph graph holds a {kind.lower()} node whose reads and writes were not declared"
    refuses(streams, lambda: fake.captured(streams.main.handle, kind) and None, EngineError, message)
    assert "cuGraphDestroy" in fake.calls


def test_a_node_that_only_orders_needs_no_declaration(streams: Streams, fake: FakeDriver) -> None:
    graph = capture(streams, lambda: fake.captured(streams.main.handle, "EMPTY") and None)
    assert [node.work for node in graph.nodes()] == [Work("empty")]


def test_all_edges_of_a_wide_graph_are_read(streams: Streams, events: Events, fake: FakeDriver) -> None:
    graph = capture(streams, forked(streams, events))
    fake.nodes = ["KERNEL"] * 5
    fake.edges = [(a, b, False) for a in range(5) for b in range(5) if a != b] * 3
    assert len(graph.edges()) == 60


def test_an_edge_of_an_unknown_kind_is_refused(
    streams: Streams, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(streams, forked(streams, events))
    data = driver.CUgraphEdgeData()
    data.type, data.from_port = 1, 2
    node = driver.CUgraphNode(0x500)
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuGraphGetEdges", lambda *_: (success, [node], [node], [data], 1))
    with pytest.raises(EngineError, match="an edge of type 1 from port 2"):
        graph.edges()


def test_a_replay_that_fails_names_the_graph(streams: Streams, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    monkeypatch.setattr(driver, "cuGraphLaunch", lambda *_: failed)
    graph: CapturedGraph = capture(streams, forked(streams, events), "T=8")
    with pytest.raises(EngineFailedError, match="cuGraphLaunch of T=8 failed"):
        graph.launch(streams.main)
