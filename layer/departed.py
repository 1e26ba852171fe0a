"""Names of adapters that are no longer loaded: which version numbers they used up, and why they went."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Departure:
    version: int
    evicted: bool


class DepartedNames:
    """Remembers the last ``limit`` names that left, so that no name ever gets a version number twice.

    Versions of a name count 1, 2, …, through unloading and loading again. Names beyond ``limit`` are
    forgotten, oldest first; their numbers are not: a name that is not remembered goes on from the
    highest version of all that were forgotten.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._names: dict[str, _Departure] = {}
        self._forgotten_version = 0

    def __len__(self) -> int:
        return len(self._names)

    @property
    def evicted(self) -> tuple[str, ...]:
        """The names that were evicted, not unloaded, oldest first."""
        return tuple(name for name, departure in self._names.items() if departure.evicted)

    def was_evicted(self, name: str) -> bool:
        """Whether ``name`` is remembered as evicted."""
        departure = self._names.get(name)
        return departure is not None and departure.evicted

    def add(self, name: str, version: int, *, evicted: bool) -> None:
        """``name`` left, its last version having been ``version``."""
        self._names[name] = _Departure(version, evicted)
        if len(self._names) > self._limit:
            forgotten = self._names.pop(next(iter(self._names)))
            self._forgotten_version = max(self._forgotten_version, forgotten.version)

    def come_back(self, name: str) -> int:
        """``name`` is loaded again, or for the first time: the version it now has."""
        departure = self._names.pop(name, None)
        return 1 + (departure.version if departure else self._forgotten_version)
