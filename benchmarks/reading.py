"""The GPU's read bandwidth, measured by a kernel that only reads, and a read that sweeps L2 clean."""

from functools import partial

import torch

from moelet.graphs import kernels
from moelet.graphs.arguments import int32, int64, pointer
from moelet.graphs.capture import capture
from moelet.graphs.driver import Device
from moelet.graphs.kernel import PreparedLaunch
from moelet.graphs.kernels import Kernels
from moelet.graphs.memory import DeviceBuffer
from moelet.graphs.streams import Streams

from .timing import Timing, replay_times

STAGE_BYTES, STAGES = 32 << 10, 6
"""The ring that read fastest of twenty variants on an H200."""
READ_BYTES = 4 << 30
"""What the bandwidth is measured over: so much that the kernel's start and end are no part of it."""
SWEEP_BYTES = 256 << 20
"""Several times L2."""
READS = 31


class Reader:
    """``num_bytes`` of random memory and the kernel that reads them, on the main stream."""

    def __init__(self, device: Device, loaded: Kernels, streams: Streams, num_bytes: int = READ_BYTES) -> None:
        self._streams = streams
        self._blocks = device.sm_count
        wave = self._blocks * STAGE_BYTES
        self.num_bytes = max(num_bytes // wave, 1) * wave
        self.memory = DeviceBuffer(self.num_bytes)
        self.result = DeviceBuffer(4 * self._blocks)
        self._kernel = loaded.get(kernels.stream_read(STAGE_BYTES, STAGES), dynamic=True)
        self._fill()
        self._sweep = self.launch(min(SWEEP_BYTES, self.num_bytes), evict_first=False)

    def launch(self, num_bytes: int, *, evict_first: bool = True) -> PreparedLaunch:
        """A read of the first ``num_bytes``; without ``evict_first`` it takes L2 over, as plain loads do."""
        return self._kernel.prepare(
            grid=(self._blocks, 1, 1),
            block=(64, 1, 1),
            stream=self._streams.main,
            dynamic_shared_bytes=STAGES * (STAGE_BYTES + 16),
            arguments={
                "source": pointer(self.memory.pointer),
                "result": pointer(self.result.pointer),
                "num_chunks": int64(num_bytes // STAGE_BYTES),
                "evict_first": int32(evict_first),
            },
            waits=True,
            writes=frozenset({"result"}),
        )

    def sweep(self) -> None:
        """Put a read on the main stream that leaves nothing in L2 of what was there."""
        self._sweep.launch()

    def bandwidth(self) -> float:
        """Bytes a second of reading all of the memory once, in a captured graph: the median of many."""
        graph = capture(self._streams, self.launch(self.num_bytes).launch, "read")
        replay = partial(graph.launch, self._streams.main)
        times = replay_times(self._streams.main, replay, self.sweep, replays=READS, forwards=1)
        graph.destroy()
        return self.num_bytes / (Timing.of(times).median * 1e-6)

    def _fill(self) -> None:
        words = min(self.num_bytes, 64 << 20) // 4
        pattern = torch.randint(
            -(2**31), 2**31, (words,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
        )
        for offset in range(0, self.num_bytes, pattern.nbytes):
            self.memory.write(pattern[: (self.num_bytes - offset) // 4], offset)

    def close(self) -> None:
        """Free the memory."""
        self.memory.close()
        self.result.close()
