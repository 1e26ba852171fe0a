"""The GPU that a benchmark runs on, with its kernels, streams and measured read bandwidth."""

from collections.abc import Callable

import torch

from moelet.graphs.compiler import check_driver
from moelet.graphs.driver import call, driver, open_device
from moelet.graphs.kernels import Kernels
from moelet.graphs.streams import Events, Streams

from .reading import Reader
from .timing import Timing, replay_times

BUS_ID_BYTES = 64
"""Room for the text of a PCI bus id, which is 12 characters with a domain of 16 bits."""


class Rig:
    """GPU ``ordinal``, opened for one benchmark.

    ``bandwidth`` is bytes a second, measured on opening. Raises ``DeviceUnavailableError`` where there is no GPU.
    """

    def __init__(self, ordinal: int = 0, *, sweeps: bool = True) -> None:
        self.device = open_device(ordinal)
        check_driver(self.device)
        self.kernels = Kernels(self.device.arch, self.device.max_shared_memory)
        self.streams, self.events = Streams(), Events()
        self.reader = Reader(self.device, self.kernels, self.streams)
        self.bandwidth = self.reader.bandwidth()
        self._sweeps = sweeps

    @property
    def torch_device(self) -> torch.device:
        """Where torch makes weights and checks outputs: this GPU, if torch can use one."""
        return torch.device("cuda", self.device.ordinal) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def pci_bus_id(self) -> str:
        """Where the GPU is, ``"0000:5B:00.0"``: so every program knows it, while its ordinal depends on
        CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""
        handle = call(driver.cuDeviceGet, self.device.ordinal)
        text: bytes = call(driver.cuDeviceGetPCIBusId, BUS_ID_BYTES, handle)
        return text.split(b"\0")[0].decode()

    def time(self, replay: Callable[[], None], *, replays: int, forwards: int) -> Timing:
        """The time of one of the ``forwards`` that ``replay`` puts on the main stream, each replay with L2 swept."""
        before = self.reader.sweep if self._sweeps else lambda: None
        return Timing.of(replay_times(self.streams.main, replay, before, replays=replays, forwards=forwards))

    def floor_us(self, num_bytes: float) -> float:
        """Microseconds that reading ``num_bytes`` takes at the measured bandwidth."""
        return num_bytes / self.bandwidth * 1e6

    def close(self) -> None:
        """Free everything."""
        self.streams.synchronize()
        for owned in (self.reader, self.kernels, self.events, self.streams, self.device):
            owned.close()
