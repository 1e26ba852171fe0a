"""The process that reads adapters, beside an event loop: what clients mean is what they get, or are told about."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_readers import Reader, child_of, descriptors, folder, model, no_descriptor_left, reader
from eventually import eventually
from moelet.graphs.packed import PackedAdapter
from moelet.layer.adapter import Adapter
from moelet.layer.errors import (
    AdapterCapacityError,
    AdapterForbiddenError,
    AdapterNotFoundError,
    AdapterRefusedError,
    MoeletError,
    RequestError,
)
from moelet.service import parcels
from moelet.service.adapter_reading import AdapterReading, ClientReader, ReaderDiedError
from moelet.service.adapter_roots import LONGEST_PATH, AdapterRoots
from moelet.service.errors import UnavailableError
from moelet.service.reading_process import ReadingProcess


@contextmanager
def beside(reader: Reader, root: Path) -> Iterator[ReadingProcess]:
    """A process that packs adapters for clients, below ``root``."""
    with closing(ReadingProcess(reader, reader.packed, roots=AdapterRoots([root]))) as process:
        process.way = 1
        yield process


def test_an_event_loop_gets_what_a_client_means(reader: Reader, folder: Path) -> None:
    async def read(process: ReadingProcess) -> None:
        here = ClientReader(AdapterRoots([folder]), reader.packed)
        for sent in ("demo-a", "./demo-b/../demo-b", str(folder / "demo-b")):
            (found, there), (path, mine) = await process.for_client(sent, "path"), here(sent, "path")
            assert isinstance(there, PackedAdapter)
            assert isinstance(mine, PackedAdapter)
            assert (found, there.facts) == (path, mine.facts)
            assert there.content.copied() == mine.content.copied()
            assert there.runs.copied() == mine.runs.copied()
        process.way = 0
        assert isinstance((await process.for_client("demo-a", "path"))[1], Adapter)
        process.way = 1
        at_once = await asyncio.gather(*(process.for_client(f"demo-{name}", "path") for name in "abab"))
        assert [adapter.facts.rank for _, adapter in at_once] == [8, 4, 8, 4]

    with beside(reader, folder) as process:
        asyncio.run(read(process))


def test_an_event_loop_gets_errors_as_clients_are_told(reader: Reader, folder: Path) -> None:
    cases: dict[str, tuple[type[Exception], str]] = {
        "nowhere": (AdapterNotFoundError, "^no adapter found at nowhere: there is no such folder$"),
        "../outside": (AdapterForbiddenError, "^../outside lies outside every adapter root"),
        "unreadable": (AdapterRefusedError, "^unreadable: expected files that can be read, found Permission denied$"),
        "memory": (AdapterCapacityError, "^memory: the host has too little memory left to load it$"),
        "die": (AdapterCapacityError, "^die: the host has too little memory left to load it$"),
        "crash": (ReaderDiedError, "was killed by signal 12 while it read crash, which was not loaded$"),
        "wrong": (RuntimeError, "KeyError: 'a fault of ours'"),
        "a\0b": (RequestError, "^path should be the path of an adapter's folder"),
        "\ud800": (RequestError, "^path is not a path"),
    }

    async def fail(read: AdapterReading) -> None:
        for sent, (kind, text) in cases.items():
            with pytest.raises(kind, match=text):
                await read.for_client(sent, "path")
            assert (await read.for_client("demo-a", "path"))[1].facts.path == Path("demo-a")

    for name in ("unreadable", "memory", "die", "crash", "wrong"):
        (folder / name).mkdir(exist_ok=True)
    with beside(reader, folder) as process:
        asyncio.run(fail(AdapterReading(AdapterRoots([folder]), reader.packed, process)))
        assert not process._gone


def test_clients_are_told_where_no_file_can_be_opened_any_more(reader: Reader, folder: Path) -> None:
    """Whoever reads: an adapter is not refused for what is not its fault."""

    async def fail(read: AdapterReading) -> None:
        assert (await read.for_client("demo-a", "path"))[1].facts.rank == 8
        with no_descriptor_left(), pytest.raises(UnavailableError, match=r"^demo-a cannot .* \(Too many open files\)"):
            await read.for_client("demo-a", "path")
        assert (await read.for_client("demo-a", "path"))[1].facts.rank == 8
        read.close()

    with beside(reader, folder) as process:
        asyncio.run(fail(AdapterReading(AdapterRoots([folder]), reader.packed, process)))
    asyncio.run(fail(AdapterReading(AdapterRoots([folder]), reader)))


def test_an_event_loop_is_not_told_of_what_nobody_waits_for(reader: Reader, folder: Path) -> None:
    """A reader that died in between, and an answer whose asker was cancelled."""

    async def read(process: ReadingProcess) -> None:
        held = len(descriptors())
        first = child_of(process.pid)
        await process.for_client("demo-a", "path")
        os.kill(first, signal.SIGKILL)
        while child_of(process.pid) == first:
            await asyncio.sleep(0.01)
        assert (await process.for_client("demo-b", "path"))[1].facts.rank == 4
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.for_client("slow", "path"), 0.1)
        assert (await process.for_client("demo-b", "path"))[1].facts.rank == 4
        assert len(descriptors()) <= held + 2  # the loop's own

    (folder / "slow").mkdir(exist_ok=True)
    with beside(reader, folder) as process:
        asyncio.run(read(process))


def test_a_client_is_served_whose_reader_was_dead_already(reader: Reader, folder: Path) -> None:
    """The kernel's memory, which a killed reader mostly lacked, is not what was short here."""

    async def read(process: ReadingProcess) -> None:
        reading = AdapterReading(AdapterRoots([folder]), reader.packed, process)
        for name, rank in (("demo-a", 8), ("demo-b", 4)):
            idle = child_of(process.pid)
            os.kill(process.pid, signal.SIGSTOP)  # so that it neither notices nor starts another
            os.kill(idle, signal.SIGKILL)
            loading = asyncio.ensure_future(reading.for_client(name, "path"))
            await asyncio.sleep(0.05)
            assert not loading.done()
            os.kill(process.pid, signal.SIGCONT)
            assert (await asyncio.wait_for(loading, 20))[1].facts.rank == rank

    with beside(reader, folder) as process:
        asyncio.run(read(process))


@pytest.mark.parametrize("when", ["it came", "it waits for a thread", "it is being unpacked"])
def test_an_adapter_that_came_for_whoever_was_cancelled_is_let_go_of(
    reader: Reader, folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file above all: each is a descriptor, of which a process has few."""
    take, unpack = ReadingProcess._take, parcels.unpack
    held_up, go_on = threading.Event(), threading.Event()
    tasks: list[asyncio.Task[Any]] = []

    def take_and_cancel(process: ReadingProcess) -> None:
        take(process)
        for task in tasks:
            task.cancel()

    def hold_up() -> None:
        held_up.set()
        assert go_on.wait(20)

    def unpack_slowly(*arguments: Any) -> Any:
        hold_up()
        return unpack(*arguments)

    async def read(process: ReadingProcess, pool: ThreadPoolExecutor) -> None:
        asyncio.get_running_loop().set_default_executor(pool)
        process.way = 0  # of many tensors, which a thread unpacks
        await process.for_client("demo-b", "path")
        held = descriptors()
        asking = asyncio.ensure_future(process.for_client("demo-a", "path"))
        if when == "it came":
            tasks.append(asking)
        elif when == "it waits for a thread":
            pool.submit(hold_up)
            while not held_up.is_set() or not pool._work_queue.qsize():
                await asyncio.sleep(0.001)
        else:
            monkeypatch.setattr(parcels, "unpack", unpack_slowly)
            while not held_up.is_set():
                await asyncio.sleep(0.001)
        if when != "it came":
            assert len(descriptors()) == len(held) + 1
            asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 20)
        tasks.clear()
        go_on.set()
        await asyncio.to_thread(eventually, lambda: descriptors() == held)
        assert (await process.for_client("demo-b", "path"))[1].facts.rank == 4

    monkeypatch.setattr(ReadingProcess, "_take", take_and_cancel)
    with beside(reader, folder) as process, ThreadPoolExecutor(1) as pool:
        asyncio.run(read(process, pool))


@pytest.mark.parametrize("sent", ["nowhere", "crash"])
def test_loads_that_fail_leave_no_garbage(reader: Reader, folder: Path, sent: str) -> None:
    """An error's traceback holds what it passed through: that must not hold the error."""

    async def read(process: ReadingProcess) -> int:
        found = 0
        for _ in range(10):
            with suppress(MoeletError):
                await process.for_client(sent, "path")
                raise AssertionError("it did not fail")
            found += gc.collect()
        return found

    (folder / "crash").mkdir(exist_ok=True)
    gc.disable()
    try:
        with beside(reader, folder) as process:
            gc.collect()
            assert asyncio.run(read(process)) < 10
    finally:
        gc.enable()


def test_an_event_loop_reads_by_a_thread_what_nobody_beside_it_can(
    reader: Reader, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing at first, the longest path neither, and everything once the process is gone."""
    winding = "demo-b/../" * (LONGEST_PATH // 10 - 1) + "demo-b"

    async def read(process: ReadingProcess) -> None:
        reading = AdapterReading(AdapterRoots([folder]), reader.packed, process)
        assert (await reading.for_client(winding, "path"))[1].facts.path == Path(winding)
        assert (await reading.for_client("demo-a", "path"))[1].facts.rank == 8
        assert not process._gone
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(2):
            assert (await reading.for_client("demo-b", "path"))[1].facts.path == Path("demo-b")
        assert process._gone
        reading.close()

    with beside(reader, folder) as process, caplog.at_level(logging.ERROR):
        asyncio.run(read(process))
    assert len([record for record in caplog.records if "is gone" in record.message]) == 1


def test_an_adapter_of_which_much_is_to_be_told_comes_whole(reader: Reader, folder: Path) -> None:
    many = tuple(f"a module that is not served, number {number}" for number in range(3000))

    def told(path: Path, root: Path) -> PackedAdapter:
        adapter = reader.packed(path, root)
        return replace(adapter, facts=replace(adapter.facts, ignored_keys=many))

    async def read(process: ReadingProcess) -> None:
        assert (await process.for_client("demo-a", "path"))[1].facts.ignored_keys == many

    with closing(ReadingProcess(told, roots=AdapterRoots([folder]))) as process:
        assert process(folder / "demo-a", folder).facts.ignored_keys == many
        asyncio.run(read(process))
