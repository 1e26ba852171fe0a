"""A process of its own for reading adapters, so that the interpreter that answers requests has no part in that."""

import asyncio
import ctypes
import errno
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import termios
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from ..layer.adapter import KeptAdapter
from . import parcels
from .adapter_reading import AdapterReader, ClientReader, NobodyBesideError, Read
from .adapter_roots import AdapterRoots
from .unmapping import Unmapping

log = logging.getLogger(__name__)

NAME = b"moelet-adapters"
LONGEST_MESSAGE = 1 << 16
LONGEST_PATH = 1 << 15
OOM_SCORE = b"500"
"""Where the host runs out of memory, a load should fail and not the service."""
NICENESS = 5
"""Where there are few cores, forwards go first."""
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15
_LAST_OF_STDIO = 2
_NOTHING = bytes(4)
_ONE_FILE = socket.CMSG_LEN(4)
Work = Callable[[str, str], KeptAdapter | Read]
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are meant for the service, and reach all of its group."""


class Answer(NamedTuple):
    """What came from the process: a parcel and to which question, or else how a reader ended; nothing is its end."""

    text: bytes
    files: list[int]


class ReadingProcess:
    """Readers of adapters in a process beside this one; forked when made, before threads are started whose locks it
    would find taken, and by a thread that lives as long as it should. Raises ``OSError`` where none can be started.

    ``way`` says which of ``ways`` reads, for clients below ``roots``. Where the process dies over an adapter that load
    fails, and the next one finds another: what is forked here does nothing but start readers, each as new as itself.
    Where readers cannot work at all, the service reads itself. For one thread at a time: one that waits for what it is
    given, or an event loop, which does not.
    """

    def __init__(self, *ways: AdapterReader, roots: AdapterRoots | None = None) -> None:
        self.way = 0
        self._ways = ways
        self._asked = 0
        self._gone = False
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coming: asyncio.Future[Answer] | None = None
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
                below = roots or AdapterRoots([])
                works: list[Work] = [*map(_of_folders, ways), *(ClientReader(below, way) for way in ways)]
                _run(partial(_supervise, theirs, works), service, theirs)

    @property
    def here(self) -> AdapterReader:
        """What reads in this process."""
        return self._ways[self.way]

    def __call__(self, folder: Path, root: Path) -> KeptAdapter:
        """What the reader gives. Raises what it does, ``MemoryError`` where the process was killed over it, and
        ``OSError`` where this one may open no file more."""
        if not self._gone:
            try:
                self._ask(self.way, os.fsencode(folder), os.fsencode(root))
                while (parcel := self._parcel(self._receive(), folder)) is None:
                    pass
                return parcels.unpack(*parcel, folder, self._unmapping)[1]
            except (ConnectionError, EOFError):
                self._give_up()
        return self.here(folder, root)

    async def for_client(self, sent: str, param: str) -> Read:
        """See ``ReadsBeside``; on one event loop, which does not wait for it."""
        async with self._turn:
            what = os.fsencode(sent), param.encode()
            if self._gone or len(what[0]) > LONGEST_PATH:
                raise NobodyBesideError
            path = Path(sent)
            try:
                self._watch()
                self._ask(self.way + len(self._ways), *what)
                while (parcel := self._parcel(await self._answer(), path)) is None:
                    pass
            except (ConnectionError, EOFError):
                self._give_up()
                raise NobodyBesideError from None
            if parcels.takes_long(parcel[1]):
                return await asyncio.to_thread(parcels.unpack, *parcel, path, self._unmapping)
            return parcels.unpack(*parcel, path, self._unmapping)

    def _ask(self, work: int, *what: bytes) -> None:
        self._forget_deaths()
        self._asked += 1
        self._socket.send(b"\0".join([b"%d" % self._asked, b"%d" % work, *what]))

    def _receive(self, flags: int = 0) -> Answer:
        """Raises ``OSError`` where this process may open no file more."""
        text, beside, came, _ = self._socket.recvmsg(LONGEST_MESSAGE, _ONE_FILE, flags | socket.MSG_CMSG_CLOEXEC)
        if came & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Answer(text, [int.from_bytes(file, sys.byteorder) for _, _, file in beside])

    def _parcel(self, answer: Answer, what: Path) -> tuple[int, bytes] | None:
        """The file and the letter of ``answer``, or None where it is to an earlier question. Raises ``EOFError``, and
        what ``__call__`` does where a reader ended over ``what``."""
        text, files = answer
        if not text:
            raise EOFError
        if not files:
            reason = f"the process that reads adapters was {text.decode()} while it read {what}"
            raise MemoryError(reason) if text == _killed(signal.SIGKILL) else RuntimeError(reason)
        number, letter = text.split(b" ", 1)
        if int(number) == self._asked:
            return files[0], letter
        os.close(files[0])  # its reader died before it took that up, and its successor did
        return None

    def _watch(self) -> None:
        """Have the running loop take what comes."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._take)

    async def _answer(self) -> Answer:
        assert self._loop is not None
        self._coming = self._loop.create_future()
        try:
            return await self._coming
        finally:
            self._coming = None

    def _take(self) -> None:
        """Something has come: for who waits, if anybody does."""
        coming = self._coming
        if coming is not None and coming.done():  # what came before is taken up first
            return
        try:
            answer = self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            if coming is not None:
                coming.set_exception(error)
            return
        if coming is not None:
            coming.set_result(answer)
        else:
            _close_all(answer.files)
        if not answer.text:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)

    def _forget_deaths(self) -> None:
        """Of readers that died while nothing was asked of them: each has a successor."""
        while fcntl.ioctl(self._socket, termios.FIONREAD, _NOTHING) != _NOTHING:
            _close_all(self._receive(socket.MSG_DONTWAIT).files)

    def _give_up(self) -> None:
        log.error("the process that reads adapters is gone: the service reads them itself from here on")
        self.close()

    def close(self) -> None:
        """End the process, if it is there still."""
        if not self._gone:
            self._gone = True
            self._unwatch()
            self._unmapping.close()
            self._socket.close()
            with suppress(ChildProcessError):  # where who started us has the kernel forget our children
                os.waitpid(self.pid, 0)


def _of_folders(way: AdapterReader) -> Callable[[str, str], KeptAdapter]:
    return lambda folder, root: way(Path(folder), Path(root))


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


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


def _supervise(connection: socket.socket, works: Sequence[Work]) -> None:
    """Start readers until one ends of itself: the service has closed its end of ``connection``, or the reader may not
    do here what it has to. The service learns that from the end of this process."""
    while True:
        supervisor = os.getpid()
        if (pid := _fork()) == 0:
            _run(partial(_serve, connection, works), supervisor, connection)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGSYS:
            return
        with suppress(ConnectionError):  # the next reader meets that as well, and ends in peace
            connection.send(_killed(os.WTERMSIG(status)))


def _killed(number: int) -> bytes:
    return f"killed by signal {int(number)}".encode()


def _serve(connection: socket.socket, works: Sequence[Work]) -> None:
    """Read adapters until nobody can ask any more."""
    gc.freeze()
    _prefer_as_victim()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    trim = ctypes.CDLL(None).malloc_trim
    while message := connection.recv(LONGEST_MESSAGE):
        number, work, *what = message.split(b"\0")
        file, letter = _outcome(partial(works[int(work)], *map(os.fsdecode, what)))
        try:
            socket.send_fds(connection, [b"%b %b" % (number, letter)], [file])
        finally:
            os.close(file)
        trim(0)  # what an adapter took, which may be gigabytes, is the host's again


def _outcome(work: Callable[[], KeptAdapter | Read]) -> tuple[int, bytes]:
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
