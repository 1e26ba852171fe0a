"""Readers of adapters that are killed: over a load, which fails, or before they began one, which the next one does."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter_readers import Reader, child_of, folder, model, reader
from moelet.layer.adapter import KeptAdapter
from moelet.service.adapter_reading import ReaderDiedError
from moelet.service.reading_process import ReadingProcess


@pytest.fixture
def plague(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there every new reader is killed before it looks for a question."""
    file = tmp_path / "plague"
    nice = os.nice

    def nice_or_killed(by: int) -> int:
        if file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return nice(by)

    monkeypatch.setattr(os, "nice", nice_or_killed)
    return file


@pytest.fixture
def reading(reader: Reader, plague: Path) -> Iterator[ReadingProcess]:
    process = ReadingProcess(reader, reader.packed)
    yield process
    plague.unlink(missing_ok=True)
    process.close()


@contextmanager
def asked_of_the_dead(reading: ReadingProcess, path: Path) -> Iterator[Future[KeptAdapter]]:
    """A load that is asked for when its idle reader was killed and nobody has noticed, and which somebody then does."""
    asked, idle = reading._asked, child_of(reading.pid)
    with ThreadPoolExecutor() as pool:
        os.kill(reading.pid, signal.SIGSTOP)  # so that it starts no other
        os.kill(idle, signal.SIGKILL)
        loading = pool.submit(reading, path, path.parent)
        while reading._asked == asked:
            time.sleep(0.001)
        time.sleep(0.05)  # and it is sent
        assert not loading.done()
        os.kill(reading.pid, signal.SIGCONT)
        yield loading


def test_a_reader_that_dies_fails_its_load_alone(reading: ReadingProcess, folder: Path) -> None:
    with pytest.raises(MemoryError, match=r"was killed by signal 9 while it read .*die"):
        reading(folder / "die", folder)
    assert reading(folder / "demo-a", folder).facts.rank == 8
    with pytest.raises(ReaderDiedError, match=r"was killed by signal 12 while it read .*crash"):
        reading(folder / "crash", folder)
    assert reading(folder / "demo-b", folder).facts.rank == 4


def test_a_reader_that_dies_in_between_is_not_missed(reading: ReadingProcess, folder: Path) -> None:
    first = child_of(reading.pid)
    os.kill(first, signal.SIGKILL)
    while child_of(reading.pid) == first:
        time.sleep(0.01)
    assert reading(folder / "demo-a", folder).facts.rank == 8


def test_a_load_whose_reader_was_dead_already_goes_through(
    reading: ReadingProcess, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first ever, and later ones: what was read before is not what the next reader died over."""
    for name, rank in (("demo-a", 8), ("demo-b", 4)) * 2:
        with asked_of_the_dead(reading, folder / name) as loading:
            assert loading.result(20).facts.rank == rank
        assert reading(folder / "demo-a", folder).facts.rank == 8
    told = [(record.levelno, record.message) for record in caplog.records]
    assert [level for level, _ in told] == [logging.WARNING] * 4
    assert "was killed by signal 9 before it began to read" in told[0][1]


def test_a_reader_that_is_killed_before_it_takes_up_what_was_asked_loses_nothing(
    reading: ReadingProcess, folder: Path
) -> None:
    first = child_of(reading.pid)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(reading, folder / "demo-b", folder)
        while not reading._asked:
            time.sleep(0.01)
        time.sleep(0.1)  # and it is sent
        os.kill(first, signal.SIGKILL)
        assert asked.result(20).facts.rank == 4
    assert reading(folder / "demo-a", folder).facts.rank == 8


def test_a_load_that_dies_again_at_its_second_reader_is_that_one_s_fault(reading: ReadingProcess, folder: Path) -> None:
    """The successor began it."""
    with (
        asked_of_the_dead(reading, folder / "die") as loading,
        pytest.raises(MemoryError, match=r"was killed by signal 9 while it read .*die"),
    ):
        loading.result(20)
    assert reading(folder / "demo-a", folder).facts.rank == 8


def test_readers_that_are_killed_one_after_the_other_before_they_begin_are_not_waited_for(
    reading: ReadingProcess, folder: Path, plague: Path
) -> None:
    """That is no lack of memory for the adapter; and what they left undone is nobody else's answer."""
    assert reading(folder / "demo-b", folder).facts.rank == 4  # so the first reader is past the plague
    plague.touch()
    with (
        asked_of_the_dead(reading, folder / "demo-a") as loading,
        pytest.raises(
            ReaderDiedError, match=r"was killed by signal 9 before it began to read .*demo-a, and so was the"
        ),
    ):
        loading.result(20)
    plague.unlink()
    assert reading(folder / "demo-b", folder).facts.rank == 4
    assert reading(folder / "demo-b", folder).facts.rank == 4
