"""What waits for the engine: a queue for each layer and way of routing, served in turn, the oldest first."""

import time
from collections import OrderedDict, deque
from collections.abc import Collection

from ..layer.slots import AdapterTable, AdapterVersion
from .work import Key, Part, Work

MOST_PASSES = 8
"""So many batches may take later parts before one that did not fit; then nothing passes it any more."""
MOST_LOOKS = 64
"""So many parts that do not fit are looked past for one batch."""


class SlotRoom:
    """Whether adapters find slots beside those that a batch needs already and those that cannot be moved."""

    def __init__(self, table: AdapterTable) -> None:
        self._most = table.max_loras
        self._kept = {version for version in table.slot_table() if version is not None and version.keeps_slot}

    def fits(self, versions: Collection[AdapterVersion]) -> bool:
        """Whether each of ``versions`` can have a slot."""
        return len(self._kept.union(versions)) <= self._most

    def add(self, versions: Collection[AdapterVersion]) -> None:
        """The batch needs ``versions`` too."""
        self._kept.update(versions)


class WaitingParts:
    """Parts that wait, and which of them go next.

    Queues take turns, a batch each, so that no layer waits for another's rush. In a queue the oldest part goes first;
    later ones go with it, and before others that do not fit the batch, but not before the same one for ever.

    ``requests``, ``tokens`` and ``num_bytes`` are those of all that waits.
    """

    def __init__(self, table: AdapterTable, max_batch_tokens: int) -> None:
        self.requests = 0
        self.tokens = 0
        self.num_bytes = 0
        self.max_batch_tokens = max_batch_tokens
        self._table = table
        self._queues: OrderedDict[Key, deque[Part]] = OrderedDict()

    def push(self, part: Part) -> None:
        """``part`` waits behind all others of its key."""
        self._count(part, 1)
        key = part.key
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(part)

    def push_again(self, parts: Collection[Part]) -> None:
        """``parts`` of one key, which were in a batch that failed, wait before all others, each for a batch alone."""
        for part in reversed(list(parts)):
            part.alone = True
            self._count(part, 1)
            self._queues.setdefault(part.key, deque()).appendleft(part)

    def drop(self, work: Work) -> None:
        """Nobody waits for ``work`` any more."""
        for key, queue in list(self._queues.items()):
            for part in [part for part in queue if part.work is work]:
                queue.remove(part)
                self._count(part, -1)
            if not queue:
                del self._queues[key]

    @property
    def adapters(self) -> set[str]:
        """The names of the adapters of all that waits."""
        return {version.name for queue in self._queues.values() for part in queue for version in part.versions}

    @property
    def fills_a_batch(self) -> bool:
        """Whether the batch that goes next cannot grow."""
        queue = next(iter(self._queues.values()), ())
        return sum(part.num_tokens for part in queue) >= self.max_batch_tokens

    @property
    def since(self) -> float:
        """When the oldest came, by ``time.monotonic``."""
        return min(queue[0].work.queued_at for queue in self._queues.values())

    def take(self) -> list[Part]:
        """The parts of the next batch; none where nothing waits, or all that does needs slots of batches in flight."""
        now = time.monotonic()
        for key in list(self._queues):
            queue = self._queues[key]
            taken = self._take(queue, now)
            if queue and not taken and queue[0].passes > MOST_PASSES:
                return []  # whatever went before it could hold the slots that it waits for
            if queue:
                self._queues.move_to_end(key)
            else:
                del self._queues[key]
            if taken:
                return taken
        return []

    def _take(self, queue: deque[Part], now: float) -> list[Part]:
        taken: list[Part] = []
        passed: list[Part] = []
        room = self.max_batch_tokens
        slots: SlotRoom | None = None
        while queue and room:
            part = queue.popleft()
            if part.versions and slots is None:
                slots = SlotRoom(self._table)
            if self._is_over(part, now):
                self._count(part, -1)
            elif part.num_tokens <= room and (not part.versions or (slots and slots.fits(part.versions))):
                if part.alone and (taken or passed):
                    queue.appendleft(part)
                    break
                self._count(part, -1)
                taken.append(part)
                room -= part.num_tokens
                if slots is not None:
                    slots.add(part.versions)
                if part.alone:
                    break
            elif not passed and not taken and self._needs_splitting(part):
                queue.extendleft(reversed(self._split(part)))
            else:
                passed.append(part)
                part.passes += 1
                if part.passes > MOST_PASSES or len(passed) >= MOST_LOOKS:
                    break
        queue.extendleft(reversed(passed))
        return taken

    def _is_over(self, part: Part, now: float) -> bool:
        """Whether nobody waits for ``part``, or not from now on."""
        work = part.work
        if now >= work.deadline.at:
            work.fail(work.deadline.error())
        return work.result.done()

    def _needs_splitting(self, part: Part) -> bool:
        """Whether ``part`` uses more adapters than there could be slots for if nothing else ran."""
        return len(self._pinned().union(part.versions)) > self._table.max_loras

    def _split(self, part: Part) -> tuple[Part, Part]:
        """``part`` as one that finds slots when nothing else runs, and the rest."""
        kept = self._pinned()
        room = self._table.max_loras - len(kept)
        movable = [version for version in part.versions if version not in kept]
        group = [version for version in part.versions if version in kept] + movable[:room]
        self._count(part, -1)
        parts = part.split(group)
        for each in parts:
            self._count(each, 1)
        return parts

    def _pinned(self) -> set[AdapterVersion]:
        return {v for v in self._table.slot_table() if v is not None and v.pinned and not v.retired}

    def _count(self, part: Part, by: int) -> None:
        """``part`` comes (1) or goes (-1)."""
        work = part.work
        before = work.waiting
        work.waiting += by
        if before == 0 or work.waiting == 0:
            self.requests += by
        self.tokens += by * part.num_tokens
        self.num_bytes += by * part.num_bytes
