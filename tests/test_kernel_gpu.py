"""Loading and launching on a real GPU: arguments and errors as the driver itself sees them."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_kernels import KERNELS, arena, device, load, scaled_sum, sources, step, streams, values
from moelet.graphs.arena import Arena
from moelet.graphs.arguments import pointer
from moelet.graphs.compiler import check_driver, compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.driver import Device
from moelet.graphs.kernel import Kernel
from moelet.graphs.streams import Streams
from moelet.layer.errors import EngineError

pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_of_these_tests_compile_without_a_gpu(name: str, sources: Path) -> None:
    cubin = compile_kernel(f"{name}.cu", store=CubinStore(None), sources=sources)
    assert cubin.resources.spill_stores == 0


@pytest.mark.gpu
def test_the_device_is_what_the_driver_says(device: Device) -> None:
    check_driver(device)
    properties = torch.cuda.get_device_properties(0)
    assert device.compute_capability == (properties.major, properties.minor)
    assert (device.name, device.sm_count) == (properties.name, properties.multi_processor_count)
    assert (device.total_memory, device.l2_bytes) == (properties.total_memory, properties.L2_cache_size)
    assert device.max_shared_memory == properties.shared_memory_per_block_optin
    free, total = device.memory()
    assert 0 < free <= total


@pytest.mark.gpu
def test_an_eager_launch_computes_and_takes_changed_arguments(
    scaled_sum: Kernel, arena: Arena, streams: Streams
) -> None:
    launch = step(scaled_sum, arena, streams.main, "x zero act", 2.0)
    launch.launch()
    streams.main.synchronize()
    assert torch.equal(arena.read("act"), values(0) * 2.0)
    launch.set("factor", 4.0)
    launch.launch()
    streams.main.synchronize()
    assert torch.equal(arena.read("act"), values(0) * 4.0)


@pytest.mark.gpu
def test_arguments_are_checked_against_the_kernel_itself(scaled_sum: Kernel, streams: Streams) -> None:
    assert scaled_sum.parameter_sizes == [8, 8, 8, 4, 4, 8]
    with pytest.raises(EngineError, match="takes parameters of"):
        scaled_sum.prepare(
            grid=(1, 1, 1), block=(256, 1, 1), stream=streams.main, arguments={"a": pointer(0)}, waits=True
        )


@pytest.mark.gpu
def test_a_stray_write_fails_for_good(sources: Path, device: Device) -> None:  # noqa: ARG001 (skips without one)
    source_root = Path(__file__).resolve().parent.parent / "src"
    script = f"""
from pathlib import Path
from moelet.graphs.driver import open_device
from moelet.graphs.compiler import compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.arguments import pointer
from moelet.graphs.kernel import Kernel
from moelet.graphs.streams import Stream
from moelet.layer.errors import EngineFailedError
device, stream = open_device(0), Stream("main")
kernel = Kernel(compile_kernel("stray.cu", arch=device.arch, store=CubinStore(None), sources=Path({str(sources)!r})))
launch = kernel.prepare(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, arguments={{"x": pointer(64)}}, waits=False)
launch.launch()
for _ in range(2):
    try:
        stream.synchronize()
    except EngineFailedError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=source_root
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    assert all("ILLEGAL_ADDRESS" in line and "must be restarted" in line for line in lines)
