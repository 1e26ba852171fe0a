"""A process of its own for reading adapters, so that the interpreter that answers requests has no part in that."""

import ctypes
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

log = logging.getLogger(__name__)

NAME = b"moelet-adapters"
LONGEST_MESSAGE = 1 << 16
OOM_SCORE = b"500"
"""Where the host runs out of memory, a load should fail and not the service."""
NICENESS = 5
"""Where there are few cores, forwards go first."""
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ReadingProcess:
    """Readers of adapters in a process beside this one; forked when made, which is best before threads are started.

    ``way`` says which of ``ways`` reads. Where the process dies over an adapter that load fails, and the next one finds
    another: what is forked here does nothing but start readers, each as new as itself. For one thread at a time.
    """

    def __init__(self, *ways: AdapterReader) -> None:
        self.way = 0
        self._ways = ways
        self._gone = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which numpy's library has, and guards
            self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _run(partial(_supervise, theirs, ways), service)
        theirs.close()

    def __call__(self, folder: Path, root: Path) -> KeptAdapter:
        """What the reader gives. Raises what it does, and ``MemoryError`` where the process was killed over it."""
        if not self._gone:
            try:
                return self._ask(folder, root)
            except (ConnectionError, EOFError):
                self._gone = True
                log.error("the process that reads adapters is gone: the service reads them itself from here on")
        return self._ways[self.way](folder, root)

    def _ask(self, folder: Path, root: Path) -> KeptAdapter:
        self._forget_deaths()
        self._socket.send(b"\0".join([b"%d" % self.way, *(os.fsencode(path) for path in (folder, root))]))
        answer, files, _, _ = socket.recv_fds(self._socket, LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if files:
            return parcels.unpack(files[0], int(answer), folder)
        if not answer:
            raise EOFError
        reason = f"the process that reads adapters was {answer.decode()} while it read {folder}"
        raise MemoryError(reason) if answer == _killed(signal.SIGKILL) else RuntimeError(reason)

    def _forget_deaths(self) -> None:
        """Of readers that died while nothing was asked of them: each has a successor."""
        with suppress(BlockingIOError):
            while self._socket.recv(LONGEST_MESSAGE, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _run(work: Callable[[], None], parent: int) -> NoReturn:
    """Be a process that does ``work``, ends with its parent and hears of no signal that is meant for that."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        libc.prctl(_SET_NAME, NAME)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if os.getppid() == parent:
            work()
        code = 0
    except Exception:
        log.exception("the process that reads adapters failed")
    finally:
        os._exit(code)


def _supervise(connection: socket.socket, ways: Sequence[AdapterReader]) -> None:
    """Start readers until one ends in peace, which the service's end of ``connection`` being closed makes it do."""
    while True:
        supervisor = os.getpid()
        if (pid := os.fork()) == 0:
            _run(partial(_serve, connection, ways), supervisor)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return
        connection.send(_killed(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else b"ended")


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
        way, *paths = message.split(b"\0")
        file, end = _outcome(partial(ways[int(way)], *(Path(os.fsdecode(path)) for path in paths)))
        try:
            socket.send_fds(connection, [str(end).encode()], [file])
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
