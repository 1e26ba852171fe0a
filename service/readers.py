"""The processes beside a service: one starts readers, each as new as itself, and a reader reads what it is asked."""

import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from ..layer.adapter import KeptAdapter
from . import parcels
from .adapter_reading import Found
from .adapter_roots import LONGEST_PATH

log = logging.getLogger(__name__)

NAME = b"moelet-adapters"
LONGEST_MESSAGE = 2 * max(LONGEST_PATH, parcels.LONGEST_LETTER)
LONGEST_NUMBER = 20
"""Digits of a question's number, and what ends it."""
OOM_SCORE = b"500"
"""Where the host runs out of memory, a load should fail and not the service."""
NICENESS = 5
"""Where there are few cores, forwards go first."""
Job = Callable[[str, str], KeptAdapter | Found]
"""What a question asks for by number: two texts to an adapter, and with it the folder where a client's path led."""
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15
_LAST_OF_STDIO = 2
_NUMBER_BYTES = 8
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are meant for the service, and reach all of its group."""


def fork() -> int:
    """``os.fork``, in which no signal that ends the service is lost, and of whose child none is heard.

    Python calls functions around it and swallows what the handlers of signals raise in them: one of those functions
    would keep the lock of the log.
    """
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library has, and guards
            pid = os.fork()
        if pid == 0:
            for number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def be(work: Callable[[], None], parent: int, connection: socket.socket) -> NoReturn:
    """Be the process that ``fork`` made: do ``work`` over ``connection``, with nothing else of the parent's open, and
    end with it at the latest."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        libc.prctl(_SET_NAME, NAME)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else it could wait for none of its own
        _close_others(connection.fileno())
        if os.getppid() == parent:
            work()
        code = 0
    except Exception:
        log.exception("the process that reads adapters failed")
    finally:
        os._exit(code)


def _close_others(kept: int) -> None:
    """Close all that was inherited but stdio and ``kept``: the service's port would stay open behind it."""
    for file in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if file > _LAST_OF_STDIO and file != kept:
            with suppress(OSError):  # the one that the listing itself was read through
                os.close(file)


def supervise(connection: socket.socket, jobs: Sequence[Job]) -> None:
    """Start readers until one ends of itself: the service has closed its end of ``connection``, or the reader may not
    do here what it has to. The service learns that from the end of this process.

    Of a reader that a signal ended it is told how, behind the number of the last question that any reader began: one
    that none began is still there for the next reader.
    """
    begun = mmap.mmap(-1, _NUMBER_BYTES)
    while True:
        supervisor = os.getpid()
        if (pid := fork()) == 0:
            be(partial(_serve, connection, jobs, begun), supervisor, connection)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGSYS:
            return
        with suppress(ConnectionError):  # the next reader meets that as well, and ends in peace
            connection.send(b"%d %b" % (int.from_bytes(begun[:], "little"), killed(os.WTERMSIG(status))))


def killed(number: int) -> bytes:
    """How a reader ended that was ended by a signal."""
    return f"killed by signal {int(number)}".encode()


def _serve(connection: socket.socket, jobs: Sequence[Job], begun: mmap.mmap) -> None:
    """Read adapters until nobody can ask any more, or be told; ``begun`` gets the number of each question."""
    gc.freeze()
    _prefer_as_victim()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    trim = ctypes.CDLL(None).malloc_trim
    while message := _question(connection, begun):
        number, job, *what = message.split(b"\0")
        file, letter = _outcome(partial(jobs[int(job)], *map(os.fsdecode, what)))
        try:
            socket.send_fds(connection, [b"%b %b" % (number, letter)], [file])
        except ConnectionError:  # the service was ended while it started
            return
        finally:
            os.close(file)
        trim(0)  # what an adapter took, which may be gigabytes, is the host's again


def _question(connection: socket.socket, begun: mmap.mmap) -> bytes:
    """The next message; empty where none will come. Its number is in ``begun`` before it is taken: it can be lost with
    this process, and then that is known."""
    try:
        number = connection.recv(LONGEST_NUMBER, socket.MSG_PEEK).partition(b"\0")[0]
        begun[:] = int(number or 0).to_bytes(_NUMBER_BYTES, "little")
        return connection.recv(LONGEST_MESSAGE)
    except ConnectionError:  # the service was ended and had not taken the last answer
        return b""


def _outcome(job: Callable[[], KeptAdapter | Found]) -> tuple[int, bytes]:
    """What ``job`` gives, or the error it ends in, as ``parcels.pack`` puts it."""
    try:
        return parcels.pack(job())
    except Exception as error:  # noqa: BLE001 - whoever asked raises it
        return parcels.pack(error)


def _prefer_as_victim() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_bytes(OOM_SCORE)
    except OSError as error:
        log.debug("the kernel cannot be told to spare the service: %s", error)
