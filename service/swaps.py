"""Parts of requests that wait for adapters: who gets a slot next, and who holds one until it has been computed."""

from collections import deque
from collections.abc import Callable, Iterator

from ..layer.adapter_version import AdapterVersion
from ..layer.errors import AdapterCapacityError
from ..layer.slots import AdapterTable
from .work import Part, Work

MOST_LOOKS = 64
"""So many parts that wait for slots are looked through at a time."""
MOST_ROUNDS = 8
"""So many batches may end while the first that waits for slots finds none; then no part with adapters passes it."""


class Swaps:
    """Brings the adapters of parts into slots, a part's all at once, and holds them there until it has been computed.

    A part whose adapters are in slots holds them from the moment it comes. The others wait in turn; the first takes
    slots as they come free, and later ones may pass it that need none taken. A part that holds slots waits for nothing
    but installs, so that nothing can wait in a circle.

    ``install`` has a version put into its slot, which ``installed`` or ``failed`` ends; ``go`` takes parts whose
    versions are all ready.
    """

    def __init__(
        self, table: AdapterTable, install: Callable[[AdapterVersion], None], go: Callable[[Part], None]
    ) -> None:
        self._table = table
        self._install = install
        self._go = go
        self._wanting: deque[Part] = deque()
        self._coming: dict[Part, None] = {}
        self._installs = 0
        self._rounds = 0

    def __iter__(self) -> Iterator[Part]:
        """The parts that wait here."""
        yield from self._coming
        yield from self._wanting

    def ask(self, part: Part) -> None:
        """``part``, which uses adapters, goes as soon as they are ready."""
        part.asked_at = self._rounds
        if not self._wanting:
            if _in_slots(part):
                self._hold(part)
            else:
                self._wanting.append(part)
                self.admit()
        elif _in_slots(part) and not self._is_starving(self._wanting[0]):
            self._hold(part)
        else:
            self._wanting.append(part)

    def admit(self) -> None:
        """Give slots to parts that wait for them, the first first, as far as there are any."""
        waiting = self._wanting
        passed: list[Part] = []
        while waiting and len(passed) < MOST_LOOKS:
            part = waiting.popleft()
            if part.work.over:  # it will be dropped
                passed.append(part)
            elif _in_slots(part):
                self._hold(part)
            elif passed:
                passed.append(part)
            elif self._needs_splitting(part):
                waiting.extendleft(reversed(self._split(part)))
            elif not self._place(part):
                passed.append(part)
                if self._is_starving(part):
                    break
        waiting.extendleft(reversed(passed))

    def let_go(self, part: Part) -> None:
        """``part`` needs the slots no longer that it holds; ``admit`` next."""
        if part.holds:
            part.holds = False
            self._table.unplace(part.versions)

    def drop(self, work: Work) -> list[Part]:
        """The parts of ``work`` that waited here, and do so no longer; ``admit`` next."""
        dropped = [part for part in self if part.work is work]
        self._take_out(dropped)
        return dropped

    def installed(self, version: AdapterVersion) -> None:
        """``version`` is in its slot."""
        self._installs -= 1
        self._table.installed(version)
        for part in [part for part in self._coming if version in part.versions and _ready(part)]:
            del self._coming[part]
            self._go(part)

    def failed(self, version: AdapterVersion) -> list[Part]:
        """``version`` cannot be put into its slot, which it leaves; the parts that waited for it, and do so no longer;
        ``admit`` next."""
        self._installs -= 1
        needing = [part for part in self if version in part.versions]
        self._take_out(needing)
        self._table.vacate(version)
        return needing

    def end_round(self) -> None:
        """A batch has ended; ``admit`` next."""
        if not self._installs:
            self._rounds += 1

    def _is_starving(self, first: Part) -> bool:
        """Whether nothing may pass ``first``: what holds the slots it waits for are computations, again and again."""
        return self._rounds - first.asked_at > MOST_ROUNDS and not self._installs

    def _hold(self, part: Part) -> None:
        self._table.hold(part.versions)
        self._is_held(part)

    def _place(self, part: Part) -> bool:
        """Whether all adapters of ``part`` find slots; it has them then."""
        try:
            missing = self._table.place(part.versions)
        except AdapterCapacityError:
            return False
        self._is_held(part)
        for version in missing:
            self._installs += 1
            self._install(version)
        return True

    def _is_held(self, part: Part) -> None:
        part.holds = True
        if _ready(part):
            self._go(part)
        else:
            self._coming[part] = None

    def _take_out(self, parts: list[Part]) -> None:
        for part in parts:
            if part.holds:
                del self._coming[part]
                self.let_go(part)
            else:
                self._wanting.remove(part)

    def _needs_splitting(self, part: Part) -> bool:
        """Whether ``part`` uses more adapters than there could be slots for if nothing else ran."""
        return len(self._pinned().union(part.versions)) > self._table.max_loras

    def _split(self, part: Part) -> tuple[Part, Part]:
        """``part`` as one that finds slots when nothing else runs, and the rest."""
        kept = self._pinned()
        room = self._table.max_loras - len(kept)
        movable = [version for version in part.versions if version not in kept]
        first, rest = part.split([version for version in part.versions if version in kept] + movable[:room])
        part.work.waiting += 1
        first.asked_at = rest.asked_at = part.asked_at
        return first, rest

    def _pinned(self) -> set[AdapterVersion]:
        return {v for v in self._table.slot_table() if v is not None and v.pinned and not v.retired}


def _in_slots(part: Part) -> bool:
    """Whether all adapters of ``part`` have slots, ready or not."""
    first, *others = part.versions
    return first.slot is not None and (not others or all(version.slot is not None for version in others))


def _ready(part: Part) -> bool:
    """Whether all adapters of ``part`` are in their slots."""
    first, *others = part.versions
    return first.ready and (not others or all(version.ready for version in others))
