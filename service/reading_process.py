"""A process of its own for reading adapters, so that the interpreter that answers requests has no part in that."""

import ctypes
import errno
import gc
import logging
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
from .adapters import AdapterReader
from .unmapping import Unmapping

log = logging.getLogger(__name__)

NAME = b"moelet-adapters"
LONGEST_MESSAGE = 1 << 16
OOM_SCORE = b"500"
"""Where the host runs out of memory, a load should fail and not the service."""
NICENESS = 5
"""Where there are few cores, forwards go first."""
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15
_LAST_OF_STDIO = 2
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are meant for the service, and reach all of its group."""


class ReadingProcess:
    """Readers of adapters in a process beside this one; forked when made, before threads are started whose locks it
    would find taken, and by a thread that lives as long as it should. Raises ``OSError`` where none can be started.

    ``way`` says which of ``ways`` reads. Where the process dies over an adapter that load fails, and the next one finds
    another: what is forked here does nothing but start readers, each as new as itself. Where readers cannot work at
    all, the service reads itself. For one thread at a time.
    """

    def __init__(self, *ways: AdapterReader) -> None:
        self.way = 0
        self._ways = ways
        self._asked = 0
        self._gone = False
        self._unmapping = Unmapping()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service = os.getpid()
        with theirs:
            try:
                self.pid = _fork()
            except OSError:
                self._socket.close()
                raise
            if self.pid == 0:
                _run(partial(_supervise, theirs, ways), service, theirs)

    def __call__(self, folder: Path, root: Path) -> KeptAdapter:
        """What the reader gives. Raises what it does, ``MemoryError`` where the process was killed over it, and
        ``OSError`` where this one may open no file more."""
        if not self._gone:
            try:
                return self._ask(folder, root)
            except (ConnectionError, EOFError):
                log.error("the process that reads adapters is gone: the service reads them itself from here on")
                self.close()
        return self._ways[self.way](folder, root)

    def _ask(self, folder: Path, root: Path) -> KeptAdapter:
        self._forget_deaths()
        self._asked += 1
        self._socket.send(b"\0".join([b"%d" % self._asked, b"%d" % self.way, os.fsencode(folder), os.fsencode(root)]))
        while True:
            answer, files, flags, _ = socket.recv_fds(self._socket, LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
            if not answer:
                raise EOFError
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not files:
                reason = f"the process that reads adapters was {answer.decode()} while it read {folder}"
                raise MemoryError(reason) if answer == _killed(signal.SIGKILL) else RuntimeError(reason)
            number, end = map(int, answer.split())
            if number == self._asked:
                return parcels.unpack(files[0], end, folder, self._unmapping)
            os.close(files[0])  # its reader died before it took that up, and its successor did

    def _forget_deaths(self) -> None:
        """Of readers that died while nothing was asked of them: each has a successor."""
        with suppress(BlockingIOError):
            while self._socket.recv(LONGEST_MESSAGE, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        """End the process, if it is there still."""
        if not self._gone:
            self._gone = True
            self._unmapping.close()
            self._socket.close()
            with suppress(ChildProcessError):  # where who started us has the kernel forget our children
                os.waitpid(self.pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library has, and guards
        return os.fork()


def _run(work: Callable[[], None], parent: int, connection: socket.socket) -> NoReturn:
    """Be a process that does ``work`` over ``connection``, ends with its parent and hears of no signal for that."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        libc.prctl(_SET_NAME, NAME)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
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


def _supervise(connection: socket.socket, ways: Sequence[AdapterReader]) -> None:
    """Start readers until one ends of itself: the service has closed its end of ``connection``, or the reader may not
    do here what it has to. The service learns that from the end of this process."""
    while True:
        supervisor = os.getpid()
        if (pid := _fork()) == 0:
            _run(partial(_serve, connection, ways), supervisor, connection)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGSYS:
            return
        with suppress(ConnectionError):  # the next reader meets that as well, and ends in peace
            connection.send(_killed(os.WTERMSIG(status)))


def _killed(number: int) -> bytes:
    return f"killed by signal {int(number)}".encode()


def _serve(connection: socket.socket, ways: Sequence[AdapterReader]) -> None:
    """Read adapters until nobody can ask any more."""
    gc.freeze()
    _prefer_as_victim()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    trim = ctypes.CDLL(None).malloc_trim
    while message := connection.recv(LONGEST_MESSAGE):
        number, way, *paths = message.split(b"\0")
        file, end = _outcome(partial(ways[int(way)], *(Path(os.fsdecode(path)) for path in paths)))
        try:
            socket.send_fds(connection, [b"%b %d" % (number, end)], [file])
        finally:
            os.close(file)
        trim(0)  # what an adapter took, which may be gigabytes, is the host's again


def _outcome(work: Callable[[], KeptAdapter]) -> tuple[int, int]:
    """What ``work`` gives, or the error it ends in, as ``parcels.pack`` puts it."""
    try:
        return parcels.pack(work())
    except Exception as error:  # noqa: BLE001 - whoever asked raises it
        return parcels.pack(error)


def _prefer_as_victim() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_bytes(OOM_SCORE)
    except OSError as error:
        log.debug("the kernel cannot be told to spare the service: %s", error)
