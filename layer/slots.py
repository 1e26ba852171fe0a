"""Which adapters are loaded, who uses them, and which slot each sits in: bookkeeping that touches no tensor.

The life of a version: ``put`` makes it current; each admitted request ``acquire``s it and later
``release``s it; each part of a request ``place``s the versions of its tokens before it is computed, or
``hold``s them where they have slots already, and ``unplace``s them when it is done. A version that was
given a slot is *ready* once the engine has ``installed`` it there. A replaced, removed or evicted version
is *retired*: no request can acquire it any more, those that hold it are served by it to their end, and its
slot is free once nobody holds it and no install fills it.

Nothing here locks: all calls come from one thread.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator

from .adapter import KeptAdapter
from .adapter_version import AdapterVersion, check_name
from .departed import DepartedNames
from .errors import (
    AdapterAlreadyLoadedError,
    AdapterBusyError,
    AdapterCapacityError,
    AdapterNotLoadedError,
    ConfigurationError,
)


class AdapterTable:
    """Adapters by name on the host, and the versions in the engine's ``max_loras`` slots.

    At most ``max_cpu_loras`` adapters are current; retired versions that are still in use come on top
    of them (``retired``), for no longer than their requests take. A pinned adapter is evicted neither
    from the host nor from its slot; since others must be served too, at most ``max_loras - 1`` are pinned.

    Whatever raises changes nothing. ``RuntimeError`` means that the caller miscounted.
    """

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        for option, value in (("max_loras", max_loras), ("max_cpu_loras", max_cpu_loras)):
            if value < 1:
                raise ConfigurationError(f"{option} must be at least 1, got {value}")
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self.host_evictions = self.slot_evictions = self.installs = 0
        self._current: dict[str, AdapterVersion] = {}
        self._retired: dict[AdapterVersion, None] = {}
        self._departed = DepartedNames()
        self._slots: list[AdapterVersion | None] = [None] * max_loras
        self._freed: set[int] = set()
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[AdapterVersion]:
        """The current versions, by name."""
        return iter(sorted(self._current.values(), key=lambda v: v.name))

    @property
    def retired(self) -> tuple[AdapterVersion, ...]:
        """Versions that are no longer current and still in use, oldest first."""
        return tuple(self._retired)

    @property
    def evicted(self) -> tuple[str, ...]:
        """Names evicted from the host and not loaded since, oldest first, as far as they are remembered."""
        return self._departed.evicted

    def current(self, name: str) -> AdapterVersion:
        """The current version, draining or not. Raises ``AdapterNotLoadedError`` saying which there are."""
        try:
            return self._current[name]
        except KeyError:
            raise self._not_loaded(name) from None

    def available(self, name: str) -> AdapterVersion:
        """The current version, which requests may acquire. Raises ``AdapterNotLoadedError``, also while it drains."""
        version = self.current(name)
        if version.draining:
            raise self._not_loaded(name)
        return version

    def all_available(self) -> list[AdapterVersion]:
        """The current versions that requests may acquire, by name: all that do not drain."""
        return [version for version in self if not version.draining]

    def put(self, name: str, adapter: KeptAdapter, *, pinned: bool = False, replace: bool = False) -> AdapterVersion:
        """Make ``adapter`` the current version of ``name``; with ``replace`` the old one, if any, is retired.

        Beyond ``max_cpu_loras`` the least recently used one that is neither pinned, draining nor in use is
        evicted. Raises ``RequestError`` (the name), ``AdapterAlreadyLoadedError`` (without ``replace``),
        ``AdapterBusyError`` (it is being unloaded), ``AdapterCapacityError`` (nothing can be evicted, or
        too many would be pinned).
        """
        check_name(name)
        old = self._current.get(name)
        if old is not None and not replace:
            raise AdapterAlreadyLoadedError(f"the adapter {name!r} is loaded already, as version {old.version}")
        if old is not None and old.draining:
            raise AdapterBusyError(f"the adapter {name!r} is being unloaded and cannot be replaced", old.in_flight)
        if pinned:
            self._check_pins(name)
        if old is None:
            self._make_room(name)
        else:
            self._retire(old)
        number = self._departed.come_back(name) if old is None else old.version + 1
        version = AdapterVersion(name, number, adapter, pinned)
        self._touch(version)
        self._current[name] = version
        return version

    def acquire(self, name: str) -> AdapterVersion:
        """The current version, held for one request. Raises ``AdapterNotLoadedError``, also while it drains."""
        version = self.available(name)
        version.in_flight += 1
        self._touch(version)
        return version

    def release(self, version: AdapterVersion) -> None:
        """One request lets go of ``version``."""
        if version.in_flight < 1:
            raise RuntimeError(f"version {version.version} of {version.name!r} was released more often than acquired")
        version.in_flight -= 1
        self._settle(version)

    def begin_drain(self, name: str) -> AdapterVersion:
        """Refuse new requests for ``name`` from here on. Raises ``AdapterBusyError`` when it drains already."""
        version = self.current(name)
        if version.draining:
            raise AdapterBusyError(f"the adapter {name!r} is being unloaded already", version.in_flight)
        version.draining = True
        return version

    def cancel_drain(self, name: str) -> None:
        """Accept requests for ``name`` again; does nothing when it was not draining."""
        self.current(name).draining = False

    def remove(self, name: str) -> AdapterVersion:
        """Unload ``name``, pinned or not. Raises ``AdapterBusyError`` while requests hold it."""
        version = self.current(name)
        if version.in_flight:
            held = f"the adapter {name!r} cannot be unloaded: {version.in_flight} request(s) in flight hold it"
            raise AdapterBusyError(held, version.in_flight)
        self._depart(version, evicted=False)
        return version

    def place(self, versions: Collection[AdapterVersion]) -> list[AdapterVersion]:
        """Give every one of ``versions`` a slot, held until ``unplace``; those returned must be installed now.

        Slots are taken free ones first, then from versions that are ready, that nobody holds and that are not
        pinned: those that no request waits for before the others, least recently used first. Raises
        ``AdapterCapacityError`` when there are too few; whoever asks must then ask for fewer, or wait.
        """
        wanted = dict.fromkeys(versions)
        for version in wanted:
            if version.retired and not version.in_use:
                raise RuntimeError(f"version {version.version} of {version.name!r} is gone and was placed")
        missing = [version for version in wanted if version.slot is None]
        slots = [*self.free_slots(), *self._takeable_slots(wanted)]
        if len(missing) > len(slots):
            raise AdapterCapacityError(
                f"a batch of {len(wanted)} adapters needs {len(missing)} more of the {self.max_loras} adapter slots, "
                f"and {len(slots)} can be had: the others are pinned or in use"
            )
        for version, slot in zip(missing, slots, strict=False):
            self._assign(version, slot)
        self.hold(wanted)
        return missing

    def hold(self, versions: Iterable[AdapterVersion]) -> None:
        """Hold the slots of ``versions``, which have some, until ``unplace``."""
        clock = self._clock
        for version in versions:
            version.holds += 1
            version.last_used = next(clock)

    def unplace(self, versions: Collection[AdapterVersion]) -> None:
        """Who ``place``d or ``hold``s ``versions`` is done with their slots."""
        held = dict.fromkeys(versions)
        for version in held:
            if version.holds < 1:
                raise RuntimeError(f"one of {[v.name for v in held]} was unplaced more often than placed")
        for version in held:
            version.holds -= 1
            if version.retired:
                self._settle(version)

    def installed(self, version: AdapterVersion) -> None:
        """``version`` is in its slot now, whole."""
        if not version.installing:
            raise RuntimeError(f"version {version.version} of {version.name!r} was not being installed")
        version.ready = True
        self._settle(version)

    def vacate(self, version: AdapterVersion) -> None:
        """Take ``version`` out of its slot, because installing it failed; first ``unplace`` it."""
        if version.holds:
            raise RuntimeError(f"slot {version.slot} of {version.name!r} is held {version.holds} times")
        self._free(version)
        self._settle(version)

    def free_slots(self) -> list[int]:
        """Slots that no version sits in, ascending."""
        return [slot for slot, version in enumerate(self._slots) if version is None]

    def slot_table(self) -> list[AdapterVersion | None]:
        """What sits in each of the ``max_loras`` slots."""
        return list(self._slots)

    @property
    def any_freed(self) -> bool:
        """Whether ``take_freed`` would give any."""
        return bool(self._freed)

    def take_freed(self) -> list[int]:
        """Slots whose version died since the last call and that are still free, for the engine to clear."""
        freed, self._freed = sorted(self._freed), set()
        return freed

    def _touch(self, version: AdapterVersion) -> None:
        version.last_used = next(self._clock)

    def _check_pins(self, name: str) -> None:
        pins, most = sum(v.pinned for v in self._current.values() if v.name != name), self.max_loras - 1
        if pins >= most:
            limit = f"with max_loras {self.max_loras} at most {most} may be, and {pins} are"
            raise AdapterCapacityError(f"the adapter {name!r} cannot be pinned: {limit}")

    def _make_room(self, name: str) -> None:
        if len(self._current) < self.max_cpu_loras:
            return
        idle = [v for v in self._current.values() if not (v.pinned or v.draining or v.in_use)]
        if not idle:
            raise AdapterCapacityError(
                f"the adapter {name!r} cannot be loaded: all {self.max_cpu_loras} places (max_cpu_loras) are taken "
                "by adapters that are pinned, in use or being unloaded"
            )
        self._depart(min(idle, key=lambda v: v.last_used), evicted=True)
        self.host_evictions += 1

    def _depart(self, version: AdapterVersion, *, evicted: bool) -> None:
        del self._current[version.name]
        self._departed.add(version.name, version.version, evicted=evicted)
        self._retire(version)

    def _retire(self, version: AdapterVersion) -> None:
        version.retired = True
        version.draining = False
        self._retired[version] = None
        self._settle(version)

    def _settle(self, version: AdapterVersion) -> None:
        if version.retired and not version.in_use:
            self._retired.pop(version, None)
            self._free(version)

    def _free(self, version: AdapterVersion) -> None:
        if version.slot is not None:
            self._slots[version.slot] = None
            self._freed.add(version.slot)
            version.slot, version.ready = None, False

    def _takeable_slots(self, wanted: Collection[AdapterVersion]) -> list[int]:
        """Slots that may be taken for ``wanted``, best first."""
        idle = [v for v in self._slots if v and not v.keeps_slot and v not in wanted]
        idle.sort(key=lambda v: (v.in_flight > 0, v.last_used))
        return [v.slot for v in idle if v.slot is not None]

    def _assign(self, version: AdapterVersion, slot: int) -> None:
        victim = self._slots[slot]
        if victim is not None:
            victim.slot, victim.ready = None, False
            self.slot_evictions += 1
        self._freed.discard(slot)
        self._slots[slot] = version
        version.slot = slot
        self.installs += 1

    def _not_loaded(self, name: str) -> AdapterNotLoadedError:
        evicted = ": it was evicted to make room for others" if self._departed.was_evicted(name) else ""
        why = "is being unloaded" if name in self._current else f"is not loaded{evicted}"
        loaded = ", ".join(version.name for version in self.all_available()) or "none"
        return AdapterNotLoadedError(f"the adapter {name!r} {why}; loaded: {loaded}")
