"""A layer's programs over the fake driver: every kernel has the parameters of its source, and none is run."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from fake_driver import FakeDriver, ok
from moelet.graphs.compiler import SOURCES, Cubin, Resources, Specialisation
from moelet.graphs.driver import driver
from moelet.graphs.geometry import Geometry
from moelet.graphs.kernel import Kernel
from moelet.graphs.pool import GraphPool
from moelet.graphs.program import Program
from moelet.graphs.streams import Events, Stream, Streams
from moelet.layer.spec import LayerSpec

# ruff: noqa: ARG002 (the signatures are the driver's)

SHARED_MEMORY = 232448


def parameters(kernel: str) -> list[tuple[str, str]]:
    """(type, name) of each parameter of ``cuda/<kernel>.cu``'s entry."""
    text = (SOURCES / f"{kernel}.cu").read_text()
    entry = re.search(rf'extern "C" __global__ void[^;]*?\b{kernel}\((.*?)\)\s*\{{', text, re.S)
    assert entry is not None, kernel
    return [tuple(part.strip().rsplit(maxsplit=1)) for part in entry[1].split(",")]  # type: ignore[misc]


def parameter_size(kind: str) -> int:
    return 8 if kind.endswith("*") or kind == "int64_t" else 4


class SourceKernels:
    """Stands for ``Kernels``: nothing is compiled, sizes of parameters come from the source."""

    def get(self, specialisation: Specialisation, *, dynamic: bool = False) -> Kernel:
        name = specialisation.kernel
        cubin = Cubin(name, "sm_90a", name.encode(), "", Resources(64, 0, 0, 0, 0), "compiled")
        return Kernel(cubin, SHARED_MEMORY if dynamic else 0)


class LayerDriver(FakeDriver):
    """The fake driver with kernels told apart, and a trace of launches and event operations in the host's order."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[int, list[int]] = {}
        self.names: dict[int, str] = {}
        self.trace: list[str] = []

    def name(self, streams: Streams, events: Events) -> None:
        """Let the trace speak of streams and events by name."""
        self.names = {int(named.handle): named.name for named in (*streams, *events)}
        for stream in streams:
            stream.tracer = self.tracer(stream)

    def tracer(self, stream: Stream) -> Any:
        return lambda work: self.trace.append(f"{stream.name} launches {work.label}")

    def cuModuleGetFunction(self, module, name):
        handle = self.handle()
        self.functions[handle] = [parameter_size(kind) for kind, _ in parameters(name.decode())]
        return ok(driver.CUfunction(handle))

    def cuFuncGetParamInfo(self, function, index):
        self.parameter_sizes = self.functions[int(function)]
        return super().cuFuncGetParamInfo(function, index)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        self.parameter_sizes = self.functions[int(function)]
        return super().cuLaunchKernelEx(config, function, parameters, extra)

    def cuEventRecord(self, event, stream):
        self.trace.append(f"{self.names.get(int(stream))} records {self.names.get(int(event))}")
        return super().cuEventRecord(event, stream)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.trace.append(f"{self.names.get(int(stream))} waits {self.names.get(int(event))}")
        return super().cuStreamWaitEvent(stream, event, flags)


class LoadedKernels(SourceKernels):
    """Kernels as their sources declare them, to be closed like loaded ones."""

    def __init__(self, *_: object) -> None:
        pass

    def compile(self, *_: object) -> None:
        pass

    def seal(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeLayer:
    """The graph pool of one layer over the fake driver."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, spec: LayerSpec, shapes: Sequence[int] = (8,), rank: int = 20
    ) -> None:
        self.driver = LayerDriver()
        self.driver.install(monkeypatch)
        self.streams, self.events = Streams(), Events()
        self.spec = spec
        self.geometry = Geometry.of(spec, router_fp32=False, max_loras=3, max_lora_rank=rank)
        kernels: Any = SourceKernels()
        self.pool = GraphPool(
            self.geometry,
            shapes,
            max(shapes) + 1,
            kernels=kernels,
            streams=self.streams,
            events=self.events,
            sm_count=132,
        )

    def trace(self, program: Program) -> list[str]:
        """What an eager run asks of the driver, in order."""
        self.driver.name(self.streams, self.events)
        self.driver.trace.clear()
        program.run()
        for stream in self.streams:
            stream.tracer = None
        return list(self.driver.trace)
