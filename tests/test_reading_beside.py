"""The process that reads adapters beside a service: where there is one, and that it ends however the service does."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from moelet.layer.adapter import Adapter
from moelet.service.adapter_roots import AdapterRoots
from moelet.service.server import read_beside
from served_process import Served, process, served, wait_for, wait_for_line

NO_FORK = """
import errno, os
def fork():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fork
"""
SLOW_READ = """
import os, time
from moelet.service import startup
load = startup.load_adapter
def load_slowly(folder, *arguments, **options):
    if folder.name == "slow":
        os.write(1, b"reading\\n")
        time.sleep(1)
    return load(folder, *arguments, **options)
startup.load_adapter = load_slowly
"""
GROUP = "import os; os.setpgid(0, 0)\n"
LOAD = {"path": "moelet-demo/demo-b"}
SLOW_LOAD = {"path": "moelet-demo/slow"}


@contextmanager
def loading_slowly(it: Served) -> Iterator[Future[httpx.Response]]:
    """The load of an adapter that is being read for a second."""
    folder = Path(it.client.get("/v1/adapters/demo-b").json()["path"])
    shutil.copytree(folder, folder.parent / "slow", dirs_exist_ok=True)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(it.client.put, "/v1/adapters/c", json=SLOW_LOAD)
        wait_for_line(it.process, "reading")
        yield loading


def nothing(_folder: Path, _root: Path) -> Adapter:
    raise AssertionError("nothing is read here")


def living(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "State:\tZ" not in status:  # whoever started the tests may take no notice of orphans
            yield pid


def assert_ended(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while left := list(living(pids)):
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_where_no_process_can_be_started_the_service_reads_itself(tmp_path: Path) -> None:
    with served(tmp_path, before=NO_FORK) as it:
        assert it.readers() == []
        assert it.client.put("/v1/adapters/c", json=LOAD).status_code == 201
        it.process.send_signal(signal.SIGTERM)
        assert it.wait() == 0
    log = it.log.read_text()
    assert "no process can be started that reads adapters" in log
    assert "Traceback" not in log


def test_nothing_is_left_open_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    held = os.listdir("/proc/self/fd")  # noqa: PTH208
    with ExitStack() as ending:
        assert read_beside(ending, nothing, roots=AdapterRoots([])) is None
    assert os.listdir("/proc/self/fd") == held  # noqa: PTH208


def test_nothing_is_forked_beside_other_threads() -> None:
    with ThreadPoolExecutor() as pool, ExitStack() as ending:
        pool.submit(int).result()
        assert read_beside(ending, nothing, roots=AdapterRoots([])) is None


def test_nothing_is_forked_while_a_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with ExitStack() as ending:
        assert read_beside(ending, nothing, roots=AdapterRoots([])) is None


def test_readers_end_with_a_service_that_is_killed(tmp_path: Path) -> None:
    """And its port is free, in the middle of a load."""
    with served(tmp_path, before=SLOW_READ) as it, loading_slowly(it) as loading:
        readers = it.readers()
        assert len(readers) == 2
        it.process.kill()
        assert it.wait() == -signal.SIGKILL
        assert_ended(readers)
        assert loading.exception() is not None
    port = str(it.client.base_url.port)
    with process(tmp_path, log := tmp_path / "again", "--port", port) as again:
        assert wait_for(log, again).endswith(port)


def test_a_signal_to_all_of_the_group_ends_no_load(tmp_path: Path) -> None:
    """As a terminal sends it, and service managers do: what runs is finished."""
    with served(tmp_path, before=GROUP + SLOW_READ) as it, loading_slowly(it) as loading:
        readers = it.readers()
        os.killpg(it.process.pid, signal.SIGTERM)
        assert loading.result().status_code == 201
        assert it.wait() == 0
        assert list(living(readers)) == []
    assert "Traceback" not in it.log.read_text()


def test_a_load_that_its_reader_is_killed_over_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    with served(tmp_path, before=SLOW_READ) as it, loading_slowly(it) as loading:
        os.kill(it.readers()[1], signal.SIGKILL)
        assert loading.result().status_code == 409
        with loading_slowly(it) as crashing:
            os.kill(it.readers()[1], signal.SIGSEGV)
            answer = crashing.result()
        assert answer.status_code == 500
        assert "was killed by signal 11 while it read moelet-demo/" in answer.json()["error"]["message"]
        assert "was killed by signal 11 while it read moelet-demo/" in it.log.read_text()
        assert it.client.put("/v1/adapters/c", json={"path": "moelet-demo/demo-a"}).status_code == 201
        assert len(it.readers()) == 2
        for _ in range(3):  # one that was killed while it did nothing is none of the next load's business
            os.kill(it.readers()[1], signal.SIGKILL)
            assert it.client.put("/v1/adapters/c", json=LOAD).status_code == 200
