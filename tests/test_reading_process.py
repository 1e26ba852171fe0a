"""The process that reads adapters: what it gives is what reading here gives, errors too, and no death of it is felt."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapter_readers import Reader, child_of, descriptors, folder, model, no_descriptor_left, reader
from eventually import eventually
from moelet.graphs.packed import PackedAdapter
from moelet.layer.adapter import Adapter
from moelet.layer.errors import AdapterNotFoundError, AdapterRefusedError
from moelet.service.reading_process import ReadingProcess
from served_process import SOURCES

HERE = Path("here")


@pytest.fixture
def reading(reader: Reader) -> Iterator[ReadingProcess]:
    process = ReadingProcess(reader, reader.packed)
    yield process
    process.close()


@pytest.mark.parametrize("name", ["demo-a", "demo-b"])
def test_an_adapter_is_the_one_that_is_read_here(
    reading: ReadingProcess, reader: Reader, folder: Path, name: str
) -> None:
    here, there = reader(folder / name, folder), reading(folder / name, folder)
    assert isinstance(there, Adapter)
    assert there.facts == here.facts
    for index, layer in here.layers.items():
        assert [name for name, _ in there.layers[index].items()] == [name for name, _ in layer.items()]
        for (_, mine), (_, theirs) in zip(layer.items(), there.layers[index].items(), strict=True):
            for part in ("a", "b", "scaling", "ranks"):
                assert torch.equal(getattr(theirs, part), getattr(mine, part))


@pytest.mark.parametrize("name", ["demo-a", "demo-b"])
def test_a_packed_adapter_is_the_one_that_is_packed_here(
    reading: ReadingProcess, reader: Reader, folder: Path, name: str
) -> None:
    reading.way = 1
    here, there = reader.packed(folder / name, folder), reading(folder / name, folder)
    assert isinstance(there, PackedAdapter)
    assert there.facts == here.facts
    assert there.content.copied() == here.content.copied()
    assert there.runs.copied() == here.runs.copied()
    assert there.at(HERE).facts == replace(here.facts, path=HERE)


def test_loads_leave_no_descriptor_and_no_mapping(reading: ReadingProcess, folder: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("moelet-adapter")

    held = descriptors()
    adapters = [reading(folder / "demo-a", folder) for _ in range(5)]
    assert descriptors() == held
    assert mappings() > 0
    del adapters
    eventually(lambda: mappings() == 0)


def test_errors_are_those_of_reading_here(reading: ReadingProcess, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AdapterNotFoundError, match=f"^no adapter found at {tmp_path}/nowhere: there is no such folder$"
    ):
        reading(tmp_path / "nowhere", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "all"}')
    with pytest.raises(AdapterRefusedError) as refused:
        reading(tmp_path, tmp_path)
    assert (refused.value.key, refused.value.expected, refused.value.found) == ("bias", "null or 'none'", "'all'")
    assert str(refused.value) == "bias: expected null or 'none', found 'all'"
    with pytest.raises(PermissionError) as denied:
        reading(folder / "unreadable", folder)
    assert (denied.value.errno, denied.value.strerror) == (13, "Permission denied")
    with pytest.raises(MemoryError, match="too much"):
        reading(folder / "memory", folder)
    with pytest.raises(RuntimeError, match="KeyError: 'a fault of ours'") as fault:
        reading(folder / "wrong", folder)
    assert "raise KeyError" in fault.value.__notes__[0]
    assert reading(folder / "demo-a", folder).facts.rank == 8


def test_a_service_that_may_open_no_file_more_is_told_so(reading: ReadingProcess, folder: Path) -> None:
    assert reading(folder / "demo-a", folder).facts.rank == 8
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        reading(folder / "demo-a", folder)
    assert reading(folder / "demo-b", folder).facts.rank == 4


def refused(*_: object, **__: object) -> None:
    """What a filter of system calls, or a limit, makes of one."""
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("what", ["memfd_create", "nice", "waitpid"])
def test_where_a_reader_may_not_do_what_it_has_to_the_service_reads_itself(
    reader: Reader, folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, what, refused)
        process = ReadingProcess(reader, reader.packed)
    if what != "memfd_create":  # which a reader meets once it has read
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] == "Z")
    with caplog.at_level(logging.ERROR):
        assert [process(folder / name, folder).facts.rank for name in ("demo-a", "demo-b")] == [8, 4]
    assert len(caplog.records) == 1
    assert not Path(f"/proc/{process.pid}").exists()
    process.close()


def test_a_reader_that_is_killed_for_a_system_call_is_the_last(reader: Reader, folder: Path) -> None:
    process = ReadingProcess(reader)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reader, "__call__", lambda _reader, path, _root: path)
        assert process(folder / "forbidden", folder) == folder / "forbidden"
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_parent_that_waits_for_no_child_makes_no_difference(reader: Reader, folder: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = ReadingProcess(reader)
        with pytest.raises(MemoryError):
            process(folder / "die", folder)
        assert process(folder / "demo-a", folder).facts.rank == 8
        process.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_processes_hold_nothing_of_the_service_open(reader: Reader, folder: Path) -> None:
    def held(pid: int) -> list[str]:
        found = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found += [str(link.readlink())] * (int(link.name) > 2)
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener, closing(ReadingProcess(reader)) as process:
        child = child_of(process.pid)
        process(folder / "demo-a", folder)
        until = time.monotonic() + 10
        while any("memfd" in link for link in held(child)):  # an answer that it is about to close
            assert time.monotonic() < until
        ours = str(Path(f"/proc/self/fd/{listener.fileno()}").readlink())
        [of_supervisor], [of_child] = held(process.pid), held(child)
        assert of_supervisor == of_child != ours
        assert of_child.startswith("socket:")


def test_without_its_process_the_service_reads_itself(
    reading: ReadingProcess, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(reading.pid, signal.SIGKILL)
    os.waitid(os.P_PID, reading.pid, os.WEXITED | os.WNOWAIT)
    with caplog.at_level(logging.ERROR):
        assert [reading(folder / name, folder).facts.rank for name in ("demo-a", "demo-b")] == [8, 4]
    assert [record.message for record in caplog.records] == [
        "the process that reads adapters is gone: the service reads them itself from here on"
    ]
    assert not Path(f"/proc/{reading.pid}").exists()


def test_closing_ends_every_process(reader: Reader, folder: Path) -> None:
    process = ReadingProcess(reader)
    process(folder / "demo-a", folder)
    child = child_of(process.pid)
    process.close()
    for pid in (process.pid, child):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("name", ["demo-a", "slow", "endless"])
def test_closing_waits_a_moment_for_what_is_read(
    reader: Reader, folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with log_to_stderr():
        process = ReadingProcess(reader)
    child = child_of(process.pid)
    process._ask(0, os.fsencode(folder / name), os.fsencode(folder))
    select.select([process._socket], [], [], 10 if name == "demo-a" else 0.1)  # of which nobody takes the answer
    begun = time.monotonic()
    process.close()
    assert time.monotonic() - begun < 20
    eventually(lambda: has_ended(child))
    assert not Path(f"/proc/{process.pid}").exists()
    assert capfd.readouterr().err == ""


FORKS = """
import os, signal
from moelet.service import readers
def raises(number, frame):
    raise SystemExit
signal.signal(signal.SIGTERM, raises)
{hook}
def told():
    return [signal.getsignal(signal.SIGTERM) is raises, *signal.pthread_sigmask(signal.SIG_BLOCK, [])]
try:
    if (pid := readers.fork()) == 0:
        print("child", told(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
except SystemExit:
    os.wait()
    print("heard")
print("parent", told())
"""
SIGNALLED = "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))"


@pytest.mark.parametrize("hook", ["", SIGNALLED], ids=["no signal", "a signal"])
def test_a_signal_while_the_process_is_forked_is_heard_by_the_service_alone(hook: str) -> None:
    start = [sys.executable, "-c", FORKS.format(hook=hook)]
    done = subprocess.run(start, env=os.environ | {"PYTHONPATH": SOURCES}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["child [False]", *(["heard"] if hook else []), "parent [True]"]
    assert done.stderr == ""


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """What is forked inside of this tells its errors there."""
    with open(2, "w", closefd=False) as stderr:
        handler = logging.StreamHandler(stderr)
        logging.getLogger("moelet").addHandler(handler)
        yield
        logging.getLogger("moelet").removeHandler(handler)


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_reader_ends_with_what_started_it(reading: ReadingProcess) -> None:
    """However suddenly that goes."""
    child = child_of(reading.pid)
    os.kill(reading.pid, signal.SIGKILL)
    eventually(lambda: has_ended(child))
