"""Loading, replacing and unloading adapters while requests run, and what is told of each."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..layer.adapter_version import AdapterVersion, check_name
from ..layer.errors import AdapterAlreadyLoadedError, AdapterBusyError, AdapterNotLoadedError
from ..layer.slots import AdapterTable
from .adapter_reading import AdapterReading
from .adapter_roots import AdapterRoots
from .engine_thread import EngineThread
from .errors import UnavailableError
from .sent_text import utf8

log = logging.getLogger(__name__)

Later = Callable[[Callable[[], None]], None]
"""Has small things done soon, on the event loop."""

MOST_LOADS = 256
"""Loads under way at a time. They are read one by one, and go on where their clients leave."""

UNLOAD_TIMEOUT_S = 30.0
"""How long an unload that does not say otherwise waits for requests that hold the adapter."""

CLEAR_S = 0.25
"""So long the slot of a version that is gone may hold what it held: mostly the next version takes it by then."""


class AdapterRegistry:
    """The adapters of one service, by name; used on the event loop alone.

    Adapters are read elsewhere, one at a time. Loads and unloads of one name wait for each other; whatever fails leaves
    everything as it was.
    """

    def __init__(
        self, table: AdapterTable, engine: EngineThread, roots: AdapterRoots, reading: AdapterReading, later: Later
    ) -> None:
        self.table = table
        self.roots = roots
        self._engine = engine
        self._reading = reading
        self._later = later
        self._loads = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._released = asyncio.Event()
        self._will_clear = False

    def load_at_start(self, name: str, path: Path) -> AdapterVersion:
        """Load an adapter named on the command line, from anywhere, before the event loop runs."""
        return self.table.put(name, self._reading.at_start(path))

    async def load(
        self, name: str, sent: str, *, param: str, pinned: bool | None = None, replace: bool = False
    ) -> tuple[AdapterVersion, bool]:
        """Load the adapter at the path that a client sent; (its version, whether the name is new).

        The next ``acquire`` gets this version. ``pinned`` None keeps what a replaced version had.
        Raises ``RequestError``, every ``AdapterError`` but ``AdapterNotLoadedError``, and ``UnavailableError`` where
        too many loads wait already, or no file can be opened any more.
        """
        check_name(name)
        self.roots.check_enabled()
        if self._loads >= MOST_LOADS:
            raise UnavailableError(f"{MOST_LOADS} adapters are being loaded or wait for it, and no more may")
        self._loads += 1
        try:
            async with self._lock(name):
                return await self._load(name, sent, param, pinned, replace)
        finally:
            self._loads -= 1

    async def _load(
        self, name: str, sent: str, param: str, pinned: bool | None, replace: bool
    ) -> tuple[AdapterVersion, bool]:
        current = self.find(name)
        if current is not None and not replace:
            raise AdapterAlreadyLoadedError(
                f"the adapter {name!r} is loaded already, as version {current.version}: "
                "set load_inplace to true to replace it"
            )
        folder, adapter = await self._reading.for_client(sent, param)
        if pinned is None:
            pinned = current is not None and current.pinned
        version = self.table.put(name, adapter, pinned=pinned, replace=replace)
        self.settle()
        self._log("loaded adapter %s, version %d, from %s", name, version.version, folder)
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
        self._log("unloaded adapter %s, version %d", name, version.version)
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
        """Have the engine clear the slots of versions that are gone, unless others take them soon; wake whoever waits
        for a release."""
        if self.table.any_freed and not self._will_clear:
            self._will_clear = True
            asyncio.get_running_loop().call_later(CLEAR_S, self._clear)
        self._released.set()

    def _clear(self) -> None:
        self._will_clear = False
        for slot in self.table.take_freed():
            self._engine.clear(slot).add_done_callback(_log_failure)

    def in_flight(self, name: str) -> int:
        """Requests that hold any version of ``name``."""
        current = self.find(name)
        held = sum(version.in_flight for version in self.table.retired if version.name == name)
        return held if current is None else held + current.in_flight

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

    def _log(self, *said: object) -> None:
        """Have it logged, in the name of the request that runs, once nobody waits for its answer."""
        self._later(partial(copy_context().run, log.info, *said))

    def close(self) -> None:
        """End the thread that reads."""
        self._reading.close()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _held(count: int) -> str:
    return f"{count} request{' still holds' if count == 1 else 's still hold'} it"


def _busy(name: str, timeout_s: float, why: str, in_flight: int) -> AdapterBusyError:
    return AdapterBusyError(f"the adapter {name!r} was not unloaded: after {timeout_s:g} s {why}", in_flight)


def _log_failure(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("clearing an adapter slot failed: %s", error)
