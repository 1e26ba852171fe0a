"""The read that bandwidth is measured by, on a real GPU: every chunk arrives whole and once."""

# ruff: noqa: F811 (fixtures are asked for by name)

from collections.abc import Iterator

import pytest
import torch
from benchmarks.reading import STAGE_BYTES, STAGES, Reader

from gpu_kernels import device, streams  # noqa: F401
from moelet.graphs.driver import Device
from moelet.graphs.kernels import Kernels
from moelet.graphs.streams import Streams

pytest.importorskip("cuda.bindings.driver")

WAVES = 3 * STAGES + 1


@pytest.fixture(scope="module")
def reader(device: Device, streams: Streams) -> Iterator[Reader]:
    loaded = Kernels(device.arch, device.max_shared_memory)
    reader = Reader(device, loaded, streams, WAVES * device.sm_count * STAGE_BYTES)
    yield reader
    streams.synchronize()
    reader.close()
    loaded.close()


@pytest.mark.gpu
@pytest.mark.parametrize("evict_first", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 131])
def test_each_block_reads_its_chunks(
    reader: Reader, device: Device, streams: Streams, missing: int, evict_first: bool
) -> None:
    chunks = WAVES * device.sm_count - missing
    reader.launch(chunks * STAGE_BYTES, evict_first=evict_first).launch()
    streams.main.synchronize()
    words = reader.memory.read(torch.int32, (WAVES * device.sm_count, STAGE_BYTES // 4))[:chunks, 0].tolist()
    expected = [0] * device.sm_count
    for chunk, word in enumerate(words):
        expected[chunk % device.sm_count] ^= word
    assert reader.result.read(torch.int32, (device.sm_count,)).tolist() == expected


@pytest.mark.gpu
def test_the_bandwidth_is_one_that_such_a_gpu_can_have(reader: Reader) -> None:
    # The memory is smaller than what bandwidths are measured over, so that starts and ends weigh in.
    assert 1e12 < reader.bandwidth() < 1e13
