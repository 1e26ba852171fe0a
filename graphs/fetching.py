"""Inputs that a kernel brings over the bus itself: launches of it, prepared once for what each takes from where."""

from dataclasses import dataclass

from .arguments import int32, pointer
from .kernel import Kernel, PreparedLaunch
from .streams import Stream

THREADS = 256
LANE_BYTES = 16
MOST_BLOCKS = 8
"""Blocks of the kernel that an SM holds."""


class Fetch:
    """A launch that brings one block of host memory, its last bytes from there or from elsewhere."""

    __slots__ = ("_launch", "_own", "_rest")

    def __init__(self, prepared: PreparedLaunch, own: int) -> None:
        self._launch = prepared.launch
        self._rest = prepared.arguments.address_of("rest")
        self._own = own

    def launch(self, rest: int = 0) -> None:
        """Bring the block; ``rest``: the device's address of its last bytes, where those are not in it."""
        self._rest.value = rest or self._own
        self._launch()


@dataclass(frozen=True, slots=True)
class Fetching:
    """Prepares such launches of ``kernel`` on ``stream``."""

    kernel: Kernel
    stream: Stream
    sm_count: int

    def prepare(self, source: int, target: int, first_bytes: int, num_bytes: int) -> Fetch:
        """Bring ``num_bytes`` from ``source``, the device's address of host memory, all of them or only the
        ``first_bytes``; both are whole lanes of 16."""
        lanes, rest = num_bytes // LANE_BYTES, source + first_bytes
        prepared = self.kernel.prepare(
            grid=(min(-(-lanes // THREADS), MOST_BLOCKS * self.sm_count), 1, 1),
            block=(THREADS, 1, 1),
            stream=self.stream,
            arguments={
                "first": pointer(source),
                "rest": pointer(rest),
                "target": pointer(target),
                "first_count": int32(first_bytes // LANE_BYTES),
                "count": int32(lanes),
            },
            waits=False,
            writes=frozenset({"input"}),
        )
        return Fetch(prepared, rest)
