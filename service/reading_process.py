"""The service's end of the process that reads adapters, so that the interpreter that answers requests need not."""

import asyncio
import errno
import fcntl
import logging
import os
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..layer.adapter import KeptAdapter
from . import parcels
from .adapter_reading import AdapterReader, ClientReader, Found, NobodyBesideError, ReaderDiedError
from .adapter_roots import AdapterRoots
from .readers import LONGEST_MESSAGE, Job, be, fork, killed, supervise
from .unmapping import Unmapping

log = logging.getLogger(__name__)

_NOTHING = bytes(4)
_ONE_FILE = socket.CMSG_LEN(4)
PATIENCE_S = 1.0


class Message(NamedTuple):
    """What came from the process: a parcel and the number of its question; without files how a reader ended; without
    text the end of the process itself."""

    text: bytes
    files: list[int]


class Parcel(NamedTuple):
    """What ``parcels.pack`` made of a content."""

    file: int
    letter: bytes


class ReadingProcess:
    """Readers of adapters in a process beside this one, which is forked when this is made: before there are threads,
    whose locks it would find taken for ever, and by a thread that lives as long as it should.

    ``way`` says which of ``ways`` reads; it may be set later, and clients' adapters are found below ``roots``. What is
    forked here does nothing but start readers, each as new as itself. So where a reader dies over an adapter that load
    fails, and the next one finds another reader. Where readers cannot work at all, the service reads itself.

    For one thread at a time: one that waits for what it is given, or an event loop, which does not. Raises ``OSError``
    where no process can be started.
    """

    def __init__(self, *ways: AdapterReader, roots: AdapterRoots | None = None) -> None:
        self.way = 0
        self._ways = ways
        self._asked = 0
        self._gone = False
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coming: asyncio.Future[Found | Parcel] | None = None
        self._path: Path
        self._unmapping = Unmapping()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service = os.getpid()
        with theirs:
            try:
                self.pid = fork()
            except OSError:
                self._socket.close()
                raise
            if self.pid == 0:
                below = roots or AdapterRoots([])
                jobs: list[Job] = [*map(_of_folders, ways), *(ClientReader(below, way) for way in ways)]
                be(partial(supervise, theirs, jobs), service, theirs)

    def __call__(self, folder: Path, root: Path) -> KeptAdapter:
        """What the reader gives. Raises what it does, ``ReaderDiedError`` where the process was ended over it,
        ``MemoryError`` where it was killed, and ``OSError`` where this one may open no file more."""
        if not self._gone:
            try:
                self._ask(self.way, os.fsencode(folder), os.fsencode(root))
                while (parcel := self._parcel(self._receive(), folder)) is None:
                    pass
                return parcels.unpack(*parcel, folder, self._unmapping)[1]
            except EOFError:
                self._give_up()
        return self._ways[self.way](folder, root)

    async def for_client(self, sent: str, param: str) -> Found:
        """See ``ReadsBeside``; on one event loop, which does not wait for it."""
        async with self._turn:
            what = os.fsencode(sent), param.encode()
            if self._gone:
                raise NobodyBesideError
            try:
                self._watch()
                self._ask(self.way + len(self._ways), *what)
                self._path, self._coming = Path(sent), asyncio.get_running_loop().create_future()
                content = await self._coming
            except EOFError:
                self._give_up()
                raise NobodyBesideError from None
            finally:
                self._coming = None
            if isinstance(content, Parcel):
                return await asyncio.to_thread(parcels.unpack, *content, self._path, self._unmapping)
            return content

    def _ask(self, job: int, *what: bytes) -> None:
        """Send the next question. Raises ``EOFError`` where nobody is there."""
        self._forget_deaths()
        self._asked += 1
        try:
            self._socket.send(b"\0".join([b"%d" % self._asked, b"%d" % job, *what]))
        except ConnectionError:
            raise EOFError from None

    def _receive(self, flags: int = 0) -> Message:
        """The next message. Raises ``EOFError`` likewise, and ``OSError`` where this process may open no file more."""
        try:
            text, beside, came, _ = self._socket.recvmsg(LONGEST_MESSAGE, _ONE_FILE, flags | socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            raise EOFError from None
        if came & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Message(text, [int.from_bytes(file, sys.byteorder) for _, _, file in beside])

    def _parcel(self, message: Message, what: Path) -> Parcel | None:
        """What is in ``message``, or None where it answers an earlier question. Raises ``EOFError`` for the end, and as
        ``__call__`` does where a reader ended over ``what``."""
        text, files = message
        if not text:
            raise EOFError
        if not files:
            reason = f"the process that reads adapters was {text.decode()} while it read {what}, which was not loaded"
            log.error("%s", reason)
            raise MemoryError(reason) if text == killed(signal.SIGKILL) else ReaderDiedError(reason)
        number, letter = text.split(b" ", 1)
        if int(number) == self._asked:
            return Parcel(files[0], letter)
        os.close(files[0])  # its reader died before it took that up, and its successor did
        return None

    def _watch(self) -> None:
        """Have the running loop take what comes."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._take)

    def _take(self) -> None:
        """Something has come: for who waits, if anybody does, who then goes on in a turn of the loop of its own."""
        coming = self._coming if self._coming is not None and not self._coming.done() else None
        try:
            message = self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except (EOFError, OSError) as error:
            if coming is not None:
                coming.set_exception(error)
            return
        if not message.text:
            self._unwatch()
        if coming is None:
            _close_all(message.files)
            return
        try:
            if (content := self._content(message)) is not None:
                coming.set_result(content)
        except Exception as error:  # noqa: BLE001 - who waits raises it
            coming.set_exception(error)

    def _content(self, message: Message) -> Found | Parcel | None:
        """What ``_parcel`` finds, unpacked unless that takes long."""
        parcel = self._parcel(message, self._path)
        if parcel is None or parcels.takes_long(parcel.letter):
            return parcel
        return parcels.unpack(*parcel, self._path, self._unmapping)

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
        """End the process, if it is there still: it may finish what it reads if that takes no longer than a moment."""
        if not self._gone:
            self._gone = True
            self._unwatch()
            self._unmapping.close()
            self._socket.close()
            ends = time.monotonic() + PATIENCE_S
            with suppress(ChildProcessError):  # where who started us has the kernel forget our children
                while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.001)
                    if time.monotonic() > ends:
                        os.kill(self.pid, signal.SIGKILL)  # with which the reader ends too


def _of_folders(way: AdapterReader) -> Callable[[str, str], KeptAdapter]:
    return lambda folder, root: way(Path(folder), Path(root))


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
