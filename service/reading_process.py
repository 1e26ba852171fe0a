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
MOST_DEATHS = 1
"""So many readers may be ended before one begins what was asked: it waits for the next."""


class Message(NamedTuple):
    """What came from the process: a parcel and the number of its question; without files the number of the last
    question that a reader began, and how that one ended; without text the end of the process itself."""

    text: bytes
    files: list[int]


class Parcel:
    """What ``parcels.pack`` made of a content; its file is open until it is unpacked or closed, on whichever thread."""

    def __init__(self, file: int, letter: bytes) -> None:
        self.takes_long = parcels.takes_long(letter)
        self._letter = letter
        self._files = [file]  # whoever pops it closes it

    def unpack(self, path: Path, unmapping: Unmapping) -> Found:
        """See ``parcels.unpack``; once, and not after ``close``."""
        return parcels.unpack(self._files.pop(), self._letter, path, unmapping)

    def close(self) -> None:
        """Close the file, unless it was unpacked or is just being."""
        with suppress(IndexError):
            os.close(self._files.pop())


class ReadingProcess:
    """Readers of adapters in a process beside this one, which is forked when this is made: before there are threads,
    whose locks it would find taken for ever, and by a thread that lives as long as it should.

    ``way`` says which of ``ways`` reads; it may be set later, and clients' adapters are found below ``roots``. What is
    forked here does nothing but start readers, each as new as itself. So where a reader dies over an adapter that load
    fails, and the next one finds another reader; where it dies before it began a load, its successor begins it. Where
    readers cannot work at all, the service reads itself.

    For one thread at a time: one that waits for what it is given, or an event loop, which does not. Raises ``OSError``
    where no process can be started.
    """

    def __init__(self, *ways: AdapterReader, roots: AdapterRoots | None = None) -> None:
        self.way = 0
        self._ways = ways
        self._asked = self._deaths = 0
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
        """What the reader gives. Raises what it does, ``ReaderDiedError`` where the process was ended over it, or
        several before they began it, ``MemoryError`` where it was killed over it, and ``OSError`` where this one may
        open no file more."""
        if not self._gone:
            try:
                self._ask(self.way, os.fsencode(folder), os.fsencode(root))
                while (parcel := self._parcel(self._receive(), folder)) is None:
                    pass
                return parcel.unpack(folder, self._unmapping)[1]
            except EOFError:
                self._give_up()
        return self._ways[self.way](folder, root)

    async def for_client(self, sent: str, param: str) -> Found:
        """See ``ReadsBeside``; on one event loop, which does not wait for it."""
        async with self._turn:
            what = os.fsencode(sent), param.encode()
            if self._gone:
                raise NobodyBesideError
            self._path, self._coming = Path(sent), asyncio.get_running_loop().create_future()
            try:
                content = await self._answer(*what)
                if isinstance(content, Parcel):
                    return await asyncio.to_thread(content.unpack, self._path, self._unmapping)
                return content
            finally:
                self._forget_what_came()

    async def _answer(self, sent: bytes, param: bytes) -> Found | Parcel:
        """What a reader finds. Raises ``NobodyBesideError`` where there is none any more."""
        assert self._coming is not None
        try:
            self._watch()
            self._ask(self.way + len(self._ways), sent, param)
            return await self._coming
        except EOFError:
            self._give_up()
            raise NobodyBesideError from None

    def _forget_what_came(self) -> None:
        """And close the parcel that came for one who was cancelled then, before anybody began to unpack it."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.done() and not coming.cancelled() and coming.exception() is None:
            content = coming.result()
            if isinstance(content, Parcel):
                content.close()

    def _ask(self, job: int, *what: bytes) -> None:
        """Send the next question. Raises ``EOFError`` where nobody is there."""
        self._forget_deaths()
        self._asked += 1
        self._deaths = 0
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
        """What is in ``message``, or None where it answers an earlier question, or tells of a reader that ended before
        it began this one. Raises ``EOFError`` for the end, and as ``__call__`` does where readers ended over ``what``.
        """
        text, files = message
        if not text:
            raise EOFError
        number, said = text.split(b" ", 1)
        if not files:
            self._note_death(said, what, begun=int(number) == self._asked)
            return None
        parcel = Parcel(files[0], said)
        if int(number) == self._asked:
            return parcel
        parcel.close()  # whoever asked was cancelled, or was told that its reader had died
        return None

    def _note_death(self, how: bytes, what: Path, *, begun: bool) -> None:
        """A reader ended that had ``begun`` to read ``what``, or had not. Raises as ``__call__`` does, unless the next
        one is to begin it: the question is still there."""
        if begun:
            reason = f"the process that reads adapters was {how.decode()} while it read {what}, which was not loaded"
            log.error("%s", reason)
            raise MemoryError(reason) if how == killed(signal.SIGKILL) else ReaderDiedError(reason)
        self._deaths += 1
        reason = f"the process that reads adapters was {how.decode()} before it began to read {what}"
        if self._deaths <= MOST_DEATHS:
            log.warning("%s, which the next one does", reason)
            return
        reason = f"{reason}, and so was the one before: it was not loaded"
        log.error("%s", reason)
        raise ReaderDiedError(reason)

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
            del coming  # as below
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
        finally:
            del coming  # it holds an error, and the error's traceback this frame

    def _content(self, message: Message) -> Found | Parcel | None:
        """What ``_parcel`` finds, unpacked unless that takes long."""
        parcel = self._parcel(message, self._path)
        if parcel is None or parcel.takes_long:
            return parcel
        return parcel.unpack(self._path, self._unmapping)

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
