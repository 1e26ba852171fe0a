"""Reads adapters in a process beside the tests, or ends as it is told to; and what can be seen of such a process."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from moelet.graphs.packed import PackedAdapter, Packer
from moelet.layer.adapter import Adapter
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.demo import write_demo
from moelet.layer.spec import ModelSpec


class Reader:
    """Reads an adapter, or does what the folder's name says."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.packer = Packer.of(model, max_loras=2, max_lora_rank=16)

    def __call__(self, folder: Path, root: Path) -> Adapter:
        match folder.name:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGUSR2)
            case "memory":
                raise MemoryError("too much")
            case "unreadable":
                raise PermissionError(13, "Permission denied")
            case "wrong":
                raise KeyError("a fault of ours")
            case "forbidden":
                os.kill(os.getpid(), signal.SIGSYS)
            case "slow":
                time.sleep(0.5)
            case "endless":
                time.sleep(60)
        return load_adapter(folder, self.model, max_rank=8, root=root)

    def packed(self, folder: Path, root: Path) -> PackedAdapter:
        return self.packer.pack(self(folder, root))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo")).checkpoint


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelSpec:
    return open_checkpoint(folder).model


@pytest.fixture(scope="module")
def reader(model: ModelSpec) -> Reader:
    return Reader(model)


def child_of(pid: int) -> int:
    """The one child of process ``pid``, once there is one."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("there is no child")


def descriptors() -> set[int]:
    """All that this process has open."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - the descriptor that it is read through is gone by then
    return {int(name) for name in listed if Path(f"/proc/self/fd/{name}").is_symlink()}


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process may open no file more inside of this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(descriptors())
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(Path(os.devnull).open()).fileno() < last:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
        yield
