"""Inputs that a kernel brings over the bus itself: launches of it, prepared once for what each takes from where."""

from dataclasses import dataclass

from .arguments import int32, pointer
from .kernel import Kernel, PreparedLaunch
from .streams import Stream

THREADS = 256
LANE_BYTES = 16
MOST_BLOCKS = 8
"""Blocks of the kernel that an SM holds."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Prepares such launches of ``kernel`` on ``stream``."""

    kernel: Kernel
    stream: Stream
    sm_count: int

    def prepare(self, source: int, target: int, num_bytes: int) -> PreparedLaunch:
        """Bring ``num_bytes``, whole lanes of 16, from ``source``, the device's address of host memory."""
        lanes = num_bytes // LANE_BYTES
        return self.kernel.prepare(
            grid=(min(-(-lanes // THREADS), MOST_BLOCKS * self.sm_count), 1, 1),
            block=(THREADS, 1, 1),
            stream=self.stream,
            arguments={"source": pointer(source), "target": pointer(target), "count": int32(lanes)},
            waits=False,
            writes=frozenset({"input"}),
        )
