"""What whole benchmarks run over without a GPU: the fake driver with events and a profiler, and kernels of no code."""

# ruff: noqa: ARG002 (the signatures are the driver's)

from functools import partial

import pytest
import torch
from benchmarks import reading, rig
from benchmarks.forwards import Forwards
from torch import Tensor

from fake_driver import ok
from fake_layer import LayerDriver, LoadedKernels
from moelet.graphs import engine

US = 100.0


class BenchDriver(LayerDriver):
    """The fake driver with timing events, which always lie ``US`` apart, a profiler, and a bus id for each device."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.profiled: list[int] = []
        self._profiling = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "BenchDriver":
        for room in (rig, engine):
            monkeypatch.setattr(room, "Kernels", LoadedKernels)
        monkeypatch.setattr(rig, "Reader", partial(reading.Reader, num_bytes=9 << 20))
        super().install(monkeypatch)
        return self

    def cuEventElapsedTime(self, start, end):
        return ok(US * 1e-3)

    def cuGraphInstantiate(self, graph, flags):
        self.graphs.append(self.nodes.count("KERNEL"))
        return super().cuGraphInstantiate(graph, flags)

    def cuGraphLaunch(self, executable, stream):
        if self._profiling:
            self.profiled.append(self.graphs[-1])
        return super().cuGraphLaunch(executable, stream)

    def cuDeviceGetPCIBusId(self, length, device):
        return ok(f"0000:{0x5B + int(device):02X}:00.0".encode().ljust(length, b"\0"))

    def cuProfilerStart(self):
        self._profiling = True
        return ok()

    def cuProfilerStop(self):
        self._profiling = False
        return ok()

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return ok(1)


def exact(forwards: Forwards) -> list[Tensor]:
    """What right kernels would leave."""
    return [
        torch.cat([part.weights.exact_output(part.batch) for part in parts]).bfloat16() for parts in forwards._parts
    ]
