"""A CUDA graph captured from launch code, with the declared reads and writes of every node."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..layer.errors import EngineError
from .driver import call, driver, failure
from .hazards import Edge, EdgeKind, Topology, Work
from .streams import Stream, Streams

DECLARED_KINDS = frozenset({"kernel", "memcpy", "memset"})
"""Kinds of nodes that touch memory: each must have been declared when it was launched."""
ORDERING_KINDS = frozenset({"empty", "event_record", "wait_event"})
"""Kinds of nodes that only order others. Any further kind (an allocation, a host call) is refused."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a graph: its driver handle as a number, its kind and what it declared."""

    handle: int
    kind: str
    work: Work


class CapturedGraph:
    """An instantiated graph, ready to be launched, and the template it came from.

    ``footprint_bytes`` is the GPU memory that instantiating took, as the driver's free memory shows it (it gives out
    memory in large chunks, so only the sum over many graphs means something).
    """

    def __init__(self, graph: Any, stream: Stream, works: dict[int, Work], name: str) -> None:
        self.name = name
        self._graph = graph
        self._works = works
        self._executable: Any = None
        self._launch = driver.cuGraphLaunch
        try:
            self.nodes()  # refuses what was not declared
            free_before = _free_bytes()
            self._executable = call(driver.cuGraphInstantiate, graph, 0)
            call(driver.cuGraphUpload, self._executable, stream.handle)
            stream.synchronize()
        except BaseException:
            self.destroy()
            raise
        self.footprint_bytes = max(free_before - _free_bytes(), 0)

    def launch(self, stream: Stream) -> None:
        """Put one replay on ``stream``. Graphs that share buffers must share the stream.

        Raises ``DriverError``, or ``EngineFailedError`` once the device has failed.
        """
        code = self._launch(self._executable, stream.handle)[0]
        if code != 0:
            raise failure(code, f"cuGraphLaunch of {self.name}")

    def nodes(self) -> list[GraphNode]:
        """The template's nodes. Raises ``EngineError`` for one that touches memory undeclared."""
        return [self._node(handle) for handle in self._handles()]

    def edges(self) -> list[Edge]:
        """The template's edges, between indices of ``nodes``. Raises ``EngineError`` for a kind it does not know."""
        place = {int(handle): index for index, handle in enumerate(self._handles())}
        capacity = 4 * len(place) + 16
        while True:
            # asking with room for the edge data: a query for the count alone is refused where an edge is programmatic
            sources, targets, data, count = call(driver.cuGraphGetEdges, self._template(), capacity)
            if count < capacity:
                break
            capacity *= 2
        return [
            Edge(place[int(sources[i])], place[int(targets[i])], _edge_kind(int(data[i].type), data[i].from_port))
            for i in range(count)
        ]

    def topology(self) -> Topology:
        """What the hazard checker reads."""
        return Topology([node.work for node in self.nodes()], self.edges(), self.name)

    def release_template(self) -> None:
        """Free the template's host memory; ``launch`` still works, nodes and edges can no longer be read."""
        if self._graph is not None:
            call(driver.cuGraphDestroy, self._graph)
            self._graph = None

    def destroy(self) -> None:
        """Free everything; no replay may be running. A second call does nothing."""
        self.release_template()
        if self._executable is not None:
            call(driver.cuGraphExecDestroy, self._executable)
            self._executable = None

    def _template(self) -> Any:
        if self._graph is None:
            raise EngineError(f"the template of graph {self.name} was released")
        return self._graph

    def _handles(self) -> list[Any]:
        _, count = call(driver.cuGraphGetNodes, self._template(), 0)
        if count == 0:
            return []
        handles, _ = call(driver.cuGraphGetNodes, self._template(), count)
        return list(handles)

    def _node(self, handle: Any) -> GraphNode:
        kind = _node_kind(call(driver.cuGraphNodeGetType, handle))
        work = self._works.get(int(handle))
        if work is None and kind in ORDERING_KINDS:
            work = Work(kind)
        if work is None or kind not in DECLARED_KINDS | ORDERING_KINDS:
            raise EngineError(f"graph {self.name} holds a {kind} node whose reads and writes were not declared")
        return GraphNode(int(handle), kind, work)


def capture(streams: Streams, record: Callable[[], None], name: str = "graph") -> CapturedGraph:
    """Run ``record`` with the main stream capturing, and instantiate and upload what it launched.

    ``record`` may fork to the side stream through events and must join it back. It must not allocate, synchronise,
    touch the copy stream or launch anything undeclared. Raises ``EngineError`` or ``DriverError`` where it does, after
    ending the capture; nothing of it is left.
    """
    works: dict[int, Work] = {}
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(driver.cuStreamBeginCapture, streams.main.handle, mode)
    try:
        for stream in (streams.main, streams.side):
            stream.tracer = partial(_note, works, stream)
        streams.copy.tracer = _refuse_copy_stream
        record()
    except BaseException:
        _abandon(streams.main)
        raise
    finally:
        for stream in streams:
            stream.tracer = None
    graph = call(driver.cuStreamEndCapture, streams.main.handle)
    return CapturedGraph(graph, streams.main, works, name)


def _note(works: dict[int, Work], stream: Stream, work: Work | None) -> None:
    """Map the node just captured, which is the only one that the next on the stream would depend on, to its work."""
    if work is None:
        raise EngineError(f"an operation was captured on stream {stream.name} without declaring its buffers")
    status, _, _, nodes, *_ = call(driver.cuStreamGetCaptureInfo, stream.handle)
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise EngineError(f"{work.label} was put on stream {stream.name}, which has not joined the capture")
    if len(nodes) != 1:
        raise EngineError(f"{work.label} left {len(nodes)} nodes at the end of stream {stream.name}, expected one")
    works[int(nodes[0])] = work


def _refuse_copy_stream(work: Work | None) -> None:
    label = work.label if work else "a copy"
    raise EngineError(f"{label} was put on the copy stream, which is never captured")


def _abandon(stream: Stream) -> None:
    """End a capture that failed, and drop whatever it made; the failure itself is being raised already."""
    result = driver.cuStreamEndCapture(stream.handle)
    if result[0] == 0 and int(result[1]):
        driver.cuGraphDestroy(result[1])


def _node_kind(kind: Any) -> str:
    return str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower()


def _edge_kind(kind: int, from_port: int) -> EdgeKind:
    if (kind, from_port) == (0, 0):
        return EdgeKind.FULL
    if (kind, from_port) == (1, 1):
        return EdgeKind.PROGRAMMATIC
    raise EngineError(f"the graph has an edge of type {kind} from port {from_port}, whose order is not known")


def _free_bytes() -> int:
    return int(call(driver.cuMemGetInfo)[0])
