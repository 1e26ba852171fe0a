"""``moelet serve`` as a process that a signal ends while it starts: soon, with code 0, and nothing left behind."""

import signal
import socket
from pathlib import Path

import pytest

from served_process import process, wait_for_line

SLOW_LOAD = """
import time
from moelet.layer.checkpoint import Checkpoint
def slow(self, index):
    print("load begins", flush=True)
    time.sleep(60)
Checkpoint.load_layer = slow
"""


def test_a_signal_while_loading_ends_at_once_with_0(tmp_path: Path) -> None:
    uds = tmp_path / "s"
    with process(tmp_path, tmp_path / "log", before=SLOW_LOAD, uds=uds) as started:
        wait_for_line(started, "load begins")
        with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(str(uds))
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
    assert not uds.exists()


SLOW_END = """
from concurrent.futures import ThreadPoolExecutor
from moelet.service import server
class Terminal:
    def __init__(self, **_):
        ThreadPoolExecutor(1).submit(time.sleep, 60)  # which Python waits for, unlike the threads that load
    def show_cursor(self):
        print("end begins", flush=True)
        time.sleep(60)
server.Console = Terminal
"""


def test_a_second_signal_while_loading_ends_at_once_whatever_the_first_still_does(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path / "log", before=SLOW_LOAD + SLOW_END) as started:
        wait_for_line(started, "load begins")
        started.send_signal(signal.SIGTERM)
        wait_for_line(started, "end begins")
        started.send_signal(signal.SIGINT)
        assert started.wait(10) == 0
        assert (tmp_path / "log").read_text() == ""


UNHEARD = """
import signal, threading, time
from moelet.layer.checkpoint import Checkpoint
def slow(self, index):
    signal.pthread_kill(threading.get_ident(), signal.{name})
    time.sleep(60)
Checkpoint.load_layer = slow
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_does_not_wake_the_thread_that_waits_is_heard(tmp_path: Path, name: str) -> None:
    """As it is where one comes between that thread's last look for signals and its wait."""
    with process(tmp_path, tmp_path / "log", before=UNHEARD.format(name=name)) as started:
        assert started.wait(30) == 0
        assert (tmp_path / "log").read_text() == ""


SWALLOWING = """
import time
from moelet.service import startup
def endless(*_, **__):
    print("load begins", flush=True)
    while True:
        try:
            time.sleep(60)
        except SystemExit:
            pass
startup.open_checkpoint = endless
"""


def test_a_signal_while_loading_ends_soon_whoever_swallows_it(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path / "log", before=SWALLOWING) as started:
        wait_for_line(started, "load begins")
        started.send_signal(signal.SIGTERM)
        assert started.wait(15) == 0


IMPORTS_END_IN = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), {signal})

sys.meta_path.insert(0, Finder())
"""


BEFORE_OPTIONS = """
import os
from typer import main
def signalled(*_):
    os.kill(os.getpid(), {signal})
    return get_command(*_)
get_command = main.get_command
main.get_command = signalled
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", [BEFORE_OPTIONS, IMPORTS_END_IN], ids=["before options are read", "while importing"])
def test_a_signal_before_anything_is_loaded_ends_at_once_with_0(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with process(tmp_path, log, before=moment.format(signal=int(number))) as started:
        assert started.wait(30) == 0, log.read_text()
    assert log.read_text() == ""


TICKS_MEANWHILE = """
import signal, threading, time
from moelet.service import startup
def signalled(*_, **__):
    both = signal.SIGINT, signal.SIGALRM
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        signal.pthread_kill(threading.get_ident(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    time.sleep(60)
startup.open_checkpoint = signalled
"""


def test_a_signal_that_comes_with_a_tick_leaves_nothing_behind(tmp_path: Path) -> None:
    """The tick would be heard right after it, and for the end of its time."""
    uds = tmp_path / "s"
    with process(tmp_path, tmp_path / "log", before=TICKS_MEANWHILE, uds=uds) as started:
        assert started.wait(30) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "log"]
