"""What waits for the engine: a queue for each layer and way of routing, served in turn, the oldest first."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator

from ..layer.adapter_version import AdapterVersion
from ..layer.slots import AdapterTable
from .swaps import Swaps
from .work import Key, Part, Work

MOST_PASSES = 8
"""So many batches may take later parts before one that did not fit; then nothing passes it any more."""
MOST_LOOKS = 64
"""So many parts that do not fit are looked past for one batch."""


class WaitingParts:
    """Parts that wait, and which of them go next.

    A part is in a queue once its adapters are ready in their slots, which it holds; until then it waits in ``Swaps``
    and keeps nobody waiting. Queues take turns, a batch each, so that no layer waits for another's rush. In a queue the
    oldest part goes first; later ones go with it, and before others that do not fit the batch, but not before the same
    one for ever. A batch of several parts has up to ``max_batch_tokens``, or ``max_adapted_tokens`` where one of them
    has adapters, so that its bits do not depend on the others; a larger part is a batch by itself.

    ``tokens`` and ``num_bytes`` are those of all parts that wait; ``requests`` are those of which no part has entered a
    batch yet. ``install`` has a version put into its slot, and ``install_ended`` is to be called then.
    """

    def __init__(
        self,
        table: AdapterTable,
        max_batch_tokens: int,
        max_adapted_tokens: int,
        install: Callable[[AdapterVersion], None],
    ) -> None:
        self.requests = 0
        self.tokens = 0
        self.num_bytes = 0
        self.max_batch_tokens = max_batch_tokens
        self.max_adapted_tokens = max_adapted_tokens
        self._swaps = Swaps(table, install, self._queue_by_age)
        self._queues: OrderedDict[Key, deque[Part]] = OrderedDict()

    def push(self, part: Part) -> None:
        """``part`` waits behind all others of its key."""
        self._count(part, 1)
        if part.versions:
            self._swaps.ask(part)
        else:
            self._queue_of(part).append(part)

    def push_again(self, parts: Collection[Part]) -> None:
        """``parts`` of one key, which were in a batch that failed, wait before all others, each for a batch alone."""
        for part in reversed(list(parts)):
            part.alone = True
            self._count(part, 1)
            self._queue_of(part).appendleft(part)

    def drop(self, work: Work) -> None:
        """Nobody waits for ``work`` any more."""
        for key, queue in list(self._queues.items()):
            for part in [part for part in queue if part.work is work]:
                queue.remove(part)
                self._leave(part)
            if not queue:
                del self._queues[key]
        for part in self._swaps.drop(work):
            self._leave(part)
        self._swaps.admit()

    def install_ended(self, version: AdapterVersion, error: Exception | None) -> None:
        """``version`` is in its slot, or cannot be put there: then what waited for it fails."""
        if error is None:
            self._swaps.installed(version)
        else:
            for part in self._swaps.failed(version):
                self._leave(part)
                part.work.fail(error)
        self._swaps.admit()

    def landed(self, parts: Collection[Part]) -> None:
        """``parts`` were in a batch that has ended, and do not come again."""
        for part in parts:
            if part.holds:
                self._swaps.let_go(part)
        self._swaps.end_round()
        self._swaps.admit()

    @property
    def adapters(self) -> set[str]:
        """The names of the adapters of ``requests``."""
        return {version.name for part in self._parts() if part.work.waits for version in part.versions}

    @property
    def any_ready(self) -> bool:
        """Whether there is something to compute now."""
        return bool(self._queues)

    @property
    def fills_a_batch(self) -> bool:
        """Whether the batch that goes next cannot grow."""
        tokens, limit = 0, self.max_batch_tokens
        for part in next(iter(self._queues.values()), ()):
            if part.alone:
                return True
            limit = self._limit_with(part, tokens, limit) or limit
            tokens += part.num_tokens
        return tokens >= limit

    @property
    def since(self) -> float:
        """When the oldest came that can be computed now, by ``time.monotonic``; there must be one."""
        return min(queue[0].work.queued_at for queue in self._queues.values())

    def take(self) -> list[Part]:
        """The parts of the next batch; none where nothing is ready, or nobody waits any more for what was."""
        now = time.monotonic()
        taken: list[Part] = []
        over: list[Part] = []
        for key in list(self._queues):
            queue = self._queues[key]
            taken = self._take(queue, now, over)
            if queue:
                self._queues.move_to_end(key)
            else:
                del self._queues[key]
            if taken:
                break
        for part in over:
            self._leave(part)
        if over:
            self._swaps.admit()
        return taken

    def _take(self, queue: deque[Part], now: float, over: list[Part]) -> list[Part]:
        """The next batch of ``queue``; also taken out of it, ``over`` gets what nobody waits for."""
        taken: list[Part] = []
        passed: list[Part] = []
        tokens, limit = 0, self.max_batch_tokens
        while queue and tokens < limit:
            part = queue.popleft()
            if _is_over(part, now):
                over.append(part)
            elif part.alone and (taken or passed):
                queue.appendleft(part)
                break
            elif most := self._limit_with(part, tokens, limit):
                part.first = not part.work.begun
                self._count(part, -1, begun=True)
                taken.append(part)
                tokens, limit = tokens + part.num_tokens, most
                if part.alone:
                    break
            else:
                passed.append(part)
                part.passes += 1
                if part.passes > MOST_PASSES or len(passed) >= MOST_LOOKS:
                    break
        queue.extendleft(reversed(passed))
        return taken

    def _limit_with(self, part: Part, tokens: int, limit: int) -> int | None:
        """What bounds a batch of ``tokens`` up to ``limit`` once ``part`` is in it; None where that does not fit."""
        most = min(limit, self.max_adapted_tokens) if part.versions else limit
        return most if not tokens or tokens + part.num_tokens <= most else None

    def _parts(self) -> Iterator[Part]:
        for queue in self._queues.values():
            yield from queue
        yield from self._swaps

    def _queue_of(self, part: Part) -> deque[Part]:
        key = part.key
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        return queue

    def _queue_by_age(self, part: Part) -> None:
        """The adapters of ``part`` are ready: it goes before what came later."""
        queue, came = self._queue_of(part), part.work.queued_at
        if not queue or queue[-1].work.queued_at <= came:
            queue.append(part)
            return
        place = next(i for i, other in enumerate(queue) if other.work.queued_at > came)
        queue.insert(place, part)

    def _leave(self, part: Part) -> None:
        """``part`` waits no longer, and is not computed."""
        self._count(part, -1)
        self._swaps.let_go(part)

    def _count(self, part: Part, by: int, *, begun: bool = False) -> None:
        """``part`` comes (1) or goes (-1), into a batch where its work is ``begun`` by that."""
        work = part.work
        before = work.waits
        work.waiting += by
        work.begun = work.begun or begun
        self.requests += work.waits - before
        self.tokens += by * part.num_tokens
        self.num_bytes += by * part.num_bytes


def _is_over(part: Part, now: float) -> bool:
    """Whether nobody waits for ``part``, or not from now on."""
    work = part.work
    if now >= work.deadline.at:
        work.fail(work.deadline.error())
    return work.over
