"""Loading, replacing and unloading adapters while requests run, and what is told of each."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..layer.adapter import KeptAdapter
from ..layer.adapter_version import AdapterVersion, check_name
from ..layer.errors import (
    AdapterAlreadyLoadedError,
    AdapterBusyError,
    AdapterCapacityError,
    AdapterError,
    AdapterNotLoadedError,
    AdapterRefusedError,
)
from ..layer.slots import AdapterTable
from .adapter_roots import AdapterRoots
from .engine_thread import EngineThread
from .sent_text import utf8

log = logging.getLogger(__name__)

AdapterReader = Callable[[Path, Path], KeptAdapter]
"""Parses and validates the adapter in a folder, following links no further than below another folder;
raises ``AdapterError``."""

ANYWHERE = Path("/")


class AdapterRegistry:
    """The adapters of one service, by name; used on the event loop alone.

    Parsing runs on a thread of its own, one adapter at a time. Loads and unloads of one name wait
    for each other; whatever fails leaves everything as it was.
    """

    def __init__(self, table: AdapterTable, engine: EngineThread, roots: AdapterRoots, read: AdapterReader) -> None:
        self.table = table
        self.roots = roots
        self._engine = engine
        self._read = read
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moelet-adapters")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._released = asyncio.Event()

    def load_at_start(self, name: str, path: Path) -> AdapterVersion:
        """Load an adapter named on the command line, from anywhere, before the event loop runs."""
        return self.table.put(name, self._parse(path, ANYWHERE).at(path))

    async def load(
        self, name: str, sent: str, *, param: str, pinned: bool | None = None, replace: bool = False
    ) -> tuple[AdapterVersion, bool]:
        """Load the adapter at the path that a client sent; (its version, whether the name is new).

        The next ``acquire`` gets this version. ``pinned`` None keeps what a replaced version had.
        Raises ``RequestError`` and every ``AdapterError`` but ``AdapterNotLoadedError``.
        """
        check_name(name)
        self.roots.check_enabled()
        async with self._lock(name):
            current = self.find(name)
            if current is not None and not replace:
                raise AdapterAlreadyLoadedError(
                    f"the adapter {name!r} is loaded already, as version {current.version}: "
                    "set load_inplace to true to replace it"
                )
            folder, adapter = await asyncio.get_running_loop().run_in_executor(
                self._readers, partial(self._read_for_client, sent, param)
            )
            if pinned is None:
                pinned = current is not None and current.pinned
            version = self.table.put(name, adapter, pinned=pinned, replace=replace)
            self.settle()
            log.info("loaded adapter %s, version %d, from %s", name, version.version, folder)
            return version, current is None

    async def unload(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Unload ``name`` once no request holds it, waiting up to ``timeout_s``; its last record.

        Raises ``AdapterNotLoadedError``, or ``AdapterBusyError`` saying how many requests hold it still, or
        that it is being loaded or unloaded by another request.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        lock = self._lock(name)
        try:
            async with asyncio.timeout_at(deadline):
                await lock.acquire()
        except TimeoutError:
            holding = self.in_flight(name)
            why = f"another request is loading or unloading it, and {_held(holding)}"
            raise _busy(name, timeout_s, why, holding) from None
        try:
            return await self._unload(name, timeout_s, deadline)
        finally:
            lock.release()

    async def _unload(self, name: str, timeout_s: float, deadline: float) -> dict[str, Any]:
        version = self.table.begin_drain(name)
        try:
            async with asyncio.timeout_at(deadline):
                while self.in_flight(name):
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            holding = self.in_flight(name)
            raise _busy(name, timeout_s, _held(holding), holding) from None
        finally:
            self.table.cancel_drain(name)
        record = self.record(version)
        self.table.remove(name)
        self.settle()
        log.info("unloaded adapter %s, version %d", name, version.version)
        return record

    def find(self, name: str) -> AdapterVersion | None:
        """The current version of ``name``, or None."""
        try:
            return self.table.current(name)
        except AdapterNotLoadedError:
            return None

    def acquire(self, names: tuple[str, ...]) -> tuple[AdapterVersion, ...]:
        """The current version of each of ``names``, all held, or none. Raises ``AdapterNotLoadedError``."""
        held: list[AdapterVersion] = []
        try:
            for name in names:
                held.append(self.table.acquire(name))
        except AdapterNotLoadedError:
            self.release(tuple(held))
            raise
        return tuple(held)

    def release(self, versions: tuple[AdapterVersion, ...]) -> None:
        """One request lets go of each of ``versions``."""
        for version in versions:
            self.table.release(version)
        self.settle()

    def settle(self) -> None:
        """Have the engine clear the slots of versions that are gone, and wake whoever waits for a release."""
        for slot in self.table.take_freed():
            self._engine.clear(slot).add_done_callback(_log_failure)
        self._released.set()

    def in_flight(self, name: str) -> int:
        """Requests that hold any version of ``name``."""
        return self.in_flight_by_name().get(name, 0)

    def in_flight_by_name(self) -> dict[str, int]:
        """Requests in flight of each name that is loaded or still held."""
        counts: dict[str, int] = {}
        for version in (*self.table, *self.table.retired):
            counts[version.name] = counts.get(version.name, 0) + version.in_flight
        return counts

    def record(self, version: AdapterVersion) -> dict[str, Any]:
        """What is told of a loaded adapter."""
        facts = version.adapter.facts
        on_gpu = version.ready and self._engine.device.startswith("cuda")
        return {
            "name": version.name,
            "version": version.version,
            "path": utf8(str(facts.path)),
            "rank": facts.rank,
            "lora_alpha": facts.lora_alpha,
            "scaling": facts.scaling,
            "layout": facts.layout.value,
            "layers": list(facts.layers),
            "targets": list(facts.targets),
            "bytes": facts.nbytes,
            "resident": "gpu" if on_gpu else "host",
            "slot": version.slot if version.ready else None,
            "in_flight": self.in_flight(version.name),
            "pinned": version.pinned,
            "ignored_keys": list(facts.ignored_keys),
        }

    def close(self) -> None:
        """End the parsing thread."""
        self._readers.shutdown()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _parse(self, folder: Path, root: Path) -> KeptAdapter:
        """What the reader reads. Raises ``AdapterCapacityError`` where the host has no memory for it."""
        try:
            return self._read(folder, root)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
                raise
            raise AdapterCapacityError(f"{folder}: the host has too little memory left to load it") from error

    def _read_for_client(self, sent: str, param: str) -> tuple[Path, KeptAdapter]:
        """The folder that a client means and the adapter in it, which knows its path as the client wrote it.

        Off the event loop from the first look at the path on: on some file systems each takes as long as a forward.
        """
        folder, root = self.roots.resolve(sent, param)
        try:
            adapter = self._parse(folder, root)
        except AdapterError as error:
            error.args = (str(error).replace(str(folder), sent),)
            raise
        except OSError as error:
            raise AdapterRefusedError(sent, "files that can be read", error.strerror or "an I/O error") from error
        return folder, adapter.at(Path(sent))


def _held(count: int) -> str:
    return f"{count} request{' still holds' if count == 1 else 's still hold'} it"


def _busy(name: str, timeout_s: float, why: str, in_flight: int) -> AdapterBusyError:
    return AdapterBusyError(f"the adapter {name!r} was not unloaded: after {timeout_s:g} s {why}", in_flight)


def _log_failure(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("clearing an adapter slot failed: %s", error)
