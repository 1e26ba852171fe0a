"""Small kernels, and the device, streams and buffers to run them in, for tests on a real GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moelet.graphs.arena import Arena, ArenaPlan, BufferSpec
from moelet.graphs.arguments import float32, int32, int64, pointer
from moelet.graphs.compiler import compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.driver import Device, open_device
from moelet.graphs.kernel import Kernel, PreparedLaunch
from moelet.graphs.streams import Events, Stream, Streams
from moelet.layer.errors import DeviceUnavailableError

COUNT = 1 << 16
SCALED_SUM = """
extern "C" __global__ void __launch_bounds__(256) scaled_sum(
    const float* a, const float* b, float* out, float factor, int count, long long delay) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    long long start = clock64();
    while (clock64() - start < delay) {}
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) out[i] = a[i] * factor + b[i];
}
"""
STRAY = 'extern "C" __global__ void stray(int* x) { x[threadIdx.x] = 1; }'
KERNELS = {"scaled_sum": SCALED_SUM, "stray": STRAY}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    for name, source in KERNELS.items():
        (folder / f"{name}.cu").write_text(source)
    return folder


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    try:
        device = open_device(0)
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    yield device
    device.close()


@pytest.fixture(scope="module")
def streams(device: Device) -> Iterator[Streams]:  # noqa: ARG001 (a device must be current)
    streams = Streams()
    yield streams
    streams.synchronize()
    streams.close()


@pytest.fixture(scope="module")
def events(device: Device) -> Iterator[Events]:  # noqa: ARG001
    events = Events()
    yield events
    events.close()


def load(name: str, sources: Path, device: Device, shared_bytes: int = 0) -> Kernel:
    cubin = compile_kernel(f"{name}.cu", arch=device.arch, store=CubinStore(None), sources=sources)
    return Kernel(cubin, shared_bytes)


@pytest.fixture(scope="module")
def scaled_sum(sources: Path, device: Device, streams: Streams) -> Iterator[Kernel]:  # noqa: ARG001 (closed first)
    kernel = load("scaled_sum", sources, device)
    yield kernel
    kernel.close()


@pytest.fixture
def arena(device: Device, streams: Streams) -> Iterator[Arena]:  # noqa: ARG001
    names = ("x", "gate_up", "h", "delta", "act", "zero")
    arena = Arena(ArenaPlan("test", [BufferSpec(name, (COUNT,), torch.float32) for name in names]))
    arena.poison(streams.main)
    streams.main.synchronize()
    arena.write("x", values(0))
    arena.write("zero", torch.zeros(COUNT))
    yield arena
    streams.synchronize()
    arena.close()


def values(seed: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def step(
    kernel: Kernel, arena: Arena, stream: Stream, names: str, factor: float, delay: int = 0, early: bool = False
) -> PreparedLaunch:
    """``out = a * factor + b`` for ``names`` ``"a b out"``."""
    a, b, out = names.split()
    return kernel.prepare(
        grid=(8, 1, 1),
        block=(256, 1, 1),
        stream=stream,
        arguments={
            "a": pointer(arena.pointer(a)),
            "b": pointer(arena.pointer(b)),
            "out": pointer(arena.pointer(out)),
            "factor": float32(factor),
            "count": int32(COUNT),
            "delay": int64(delay),
        },
        reads=frozenset({a, b}),
        writes=frozenset({out}),
        waits=True,
        programmatic=early,
        label=out,
    )
