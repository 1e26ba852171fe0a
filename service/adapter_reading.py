"""Reads adapters for a service: in a process beside it where there is one, else on a thread of its own."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ..layer.adapter import KeptAdapter
from ..layer.adapter_files import unreadable
from ..layer.errors import AdapterCapacityError, AdapterError, MoeletError
from .adapter_roots import AdapterRoots
from .errors import UnavailableError

AdapterReader = Callable[[Path, Path], KeptAdapter]
"""Parses and validates the adapter in a folder, following links no further than below another folder;
raises ``AdapterError``."""

ANYWHERE = Path("/")

Found = tuple[str, KeptAdapter]
"""The folder that a client meant, all links resolved, and the adapter in it."""


class ReaderDiedError(MoeletError):
    """The process that read an adapter was ended by a signal: by a fault that the adapter brought out, most likely."""


class NobodyBesideError(Exception):
    """No other process reads this: the service has to do that itself."""


class ReadsBeside(Protocol):
    """Reads adapters in another process; that is ``ReadingProcess``."""

    async def for_client(self, sent: str, param: str) -> Found:
        """As ``ClientReader``. Raises what that does, what is wrong with the process, and ``NobodyBesideError``."""

    def __call__(self, folder: Path, root: Path) -> KeptAdapter:
        """As ``AdapterReader``."""


class ClientReader:
    """Finds the adapter at the path that a client sent below ``roots``, and has ``read`` read it, which then knows its
    path as the client wrote it."""

    def __init__(self, roots: AdapterRoots, read: AdapterReader) -> None:
        self._roots = roots
        self._read = read

    def __call__(self, sent: str, param: str) -> Found:
        """The folder and the adapter. Raises ``RequestError`` and every ``AdapterError``, which name the folder as the
        client did."""
        folder, root = self._roots.resolve(sent, param)
        try:
            with told_to_clients(sent):
                return str(folder), self._read(folder, root).at(Path(sent))
        except AdapterError as error:
            error.args = (str(error).replace(str(folder), sent),)
            raise


class AdapterReading:
    """What reads the adapters of one service, one at a time, off its event loop from the first look at a path on: on
    some file systems each takes as long as a forward.

    ``beside`` reads them where there is one, and ``read``, on a thread of its own, where it cannot.
    """

    def __init__(self, roots: AdapterRoots, read: AdapterReader, beside: ReadsBeside | None = None) -> None:
        self._beside = beside
        self._roots = roots
        self._read_at_start: AdapterReader = beside or read
        self._here = ClientReader(roots, read)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moelet-adapters")

    def at_start(self, folder: Path) -> KeptAdapter:
        """The adapter in ``folder``, which may lie anywhere. Raises ``AdapterError`` and ``OSError``."""
        with told_of_memory(str(folder)):
            return self._read_at_start(folder, ANYWHERE).at(folder)

    async def for_client(self, sent: str, param: str) -> Found:
        """As ``ClientReader``.

        Raises ``RequestError``, every ``AdapterError``, ``ReaderDiedError``, and ``UnavailableError`` where no file can
        be opened any more.
        """
        self._roots.check(sent, param)
        try:
            if self._beside is not None:
                with suppress(NobodyBesideError), told_to_clients(sent):
                    return await self._beside.for_client(sent, param)
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._here, sent, param)
        except OSError as error:  # such as are the adapter's fault were told of as that
            said = f"{sent} cannot be read now: the service may open no file more ({error.strerror})"
            raise UnavailableError(f"{said}; raise its limit (ulimit -n) if this stays so") from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


@contextmanager
def told_of_memory(what: str) -> Iterator[None]:
    """Raise ``AdapterCapacityError`` where the host has no memory for ``what``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise AdapterCapacityError(f"{what}: the host has too little memory left to load it") from error


@contextmanager
def told_to_clients(sent: str) -> Iterator[None]:
    """The same, and ``AdapterRefusedError`` for files that cannot be read at the path that a client ``sent``; an
    ``OSError`` that is left says that no file can be opened any more."""
    try:
        with told_of_memory(sent):
            yield
    except OSError as error:
        raise unreadable(sent, "files that can be read", error) from None
