"""Brings admitted forwards to the engine in batches: what waits when it is free goes together, several batches deep."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ..layer.adapter_version import AdapterVersion
from ..layer.errors import EngineFailedError
from .adapters import AdapterRegistry
from .batch import Batch
from .engine_thread import EngineThread
from .errors import UnavailableError
from .limits import Limits
from .metrics import Metrics
from .waiting import WaitingParts
from .wakefulness import Wakefulness
from .work import Part, Work

log = logging.getLogger(__name__)

SWEEP_S = 0.02
"""How often requests that wait are looked through for deadlines that have passed."""


class Batcher:
    """Forms batches of what waits, greedily, and gives each output to whom it belongs; used on the event loop alone.

    While the engine has fewer than ``depth`` batches, the next is formed once the event loop has read what was
    ready to be read, so that requests that come together are computed together.
    """

    def __init__(
        self,
        engine: EngineThread,
        adapters: AdapterRegistry,
        metrics: Metrics,
        limits: Limits,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._later = later
        self._engine = engine
        self._adapters = adapters
        self._metrics = metrics
        self._limits = limits
        together = limits.max_batch_tokens or engine.batch_tokens
        self._waiting = WaitingParts(adapters.table, together, min(together, engine.batch_tokens), self._install)
        self._part_tokens = limits.max_batch_tokens or engine.most_tokens
        self._open: dict[Work, None] = {}
        self._in_flight = 0
        self._will_form = False
        self._back: deque[Batch] = deque()
        self._will_sweep = False
        self._delayed: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._wakefulness: Wakefulness
        self._thread = 0
        waiting = self._waiting
        metrics.watch_queue(lambda: waiting.requests, lambda: waiting.tokens, lambda: waiting.adapters)

    def start(self) -> None:
        """Begin to take work; call on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._wakefulness = Wakefulness(self._loop, lambda: self._open)
        self._thread = threading.get_ident()

    def check_room(self) -> None:
        """Raise ``UnavailableError`` when the queue is full."""
        waiting, limits = self._waiting, self._limits
        if waiting.requests >= limits.max_queue:
            raise UnavailableError(f"the queue is full: it may hold {limits.max_queue} requests (--max-queue) and does")
        if waiting.num_bytes >= limits.max_queue_bytes:
            held = f"it may hold {limits.max_queue_bytes} bytes (--max-queue-mb) and holds {waiting.num_bytes}"
            raise UnavailableError(f"the queue is full: {held}")

    def begin(self, work: Work) -> None:
        """Queue ``work``, which will end. Raises ``UnavailableError`` when the queue is full."""
        self.check_room()
        self._open[work] = None
        # Where there are several adapters free slots may cut it too: no bit tells where, up to so many tokens.
        several = len(work.versions) > 1
        for part in work.parts(self._waiting.max_adapted_tokens if several else self._part_tokens):
            self._waiting.push(part)
        self._form_soon()
        if not self._will_sweep:
            self._will_sweep = True
            self._loop.call_later(SWEEP_S, self._sweep)

    def let_go(self, work: Work) -> None:
        """``work`` is over: of it nothing is begun any more."""
        self._open.pop(work, None)
        if work.waiting:
            self._waiting.drop(work)
            self._form_soon()

    def fail(self, error: EngineFailedError) -> None:
        """The engine failed for good: so does everything that waits for it."""
        for work in list(self._open):
            work.fail(EngineFailedError(str(error)))

    def _form_soon(self) -> None:
        if not self._will_form and self._in_flight < self._engine.depth:
            self._will_form = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Begin what is ready, and take back what was computed on the spot."""
        try:
            self._form()
        finally:
            self._take_back()

    def _form(self) -> None:
        """Begin batches of what is ready, as many as the engine takes."""
        self._will_form = False
        while self._in_flight < self._engine.depth and self._waiting.any_ready:
            if self._in_flight and (delay := self._delay()) > 0:
                if self._delayed is not None:
                    self._delayed.cancel()
                self._delayed = self._loop.call_later(delay, self._turn)
                return
            parts = self._waiting.take()
            if not parts:
                continue
            batch = Batch(parts, self._hand_back)
            try:
                self._engine.begin(batch)
            except Exception as error:  # what landed must be answered, whatever is wrong with what comes next
                log.exception("a batch could not be begun")
                for part in parts:
                    part.work.fail(error)
                self._waiting.landed(parts)
            else:
                self._in_flight += 1
                self._metrics.batch_begun(batch)

    def _delay(self) -> float:
        """How many seconds the next batch should wait for more to join it, now that the engine has work."""
        if not self._limits.queue_delay_s or self._waiting.fills_a_batch:
            return 0.0
        return self._waiting.since + self._limits.queue_delay_s - time.monotonic()

    def _hand_back(self, batch: Batch) -> None:
        """Called on the engine's threads, or on the event loop's by a forward that was begun and finished there."""
        if threading.get_ident() == self._thread:
            self._back.append(batch)
        else:
            self._loop.call_soon_threadsafe(self._came_back, batch)

    def _came_back(self, batch: Batch) -> None:
        self._back.append(batch)
        self._take_back()

    def _take_back(self) -> None:
        """Go on from the batches that were computed, and from those that are on the spot while that is done."""
        while self._back:
            try:
                self._landed(self._back.popleft())
            except Exception:
                log.exception("a batch could not be taken back")

    def _landed(self, batch: Batch) -> None:
        """Let go of the slots, begin what waits, and only then answer."""
        self._in_flight -= 1
        try:
            self._go_on(batch)
        finally:
            self._answer(batch)
            batch.error = None  # its traceback holds the batch

    def _go_on(self, batch: Batch) -> None:
        parts, error = batch.parts, batch.error
        again: list[Part] = []
        if error is not None and len(parts) > 1 and not isinstance(error, EngineFailedError):
            again = [part for part in parts if not part.work.over]
            self._waiting.push_again(again)
        self._waiting.landed([part for part in parts if not part.alone] if again else parts)
        self._adapters.settle()
        self._form()

    def _answer(self, batch: Batch) -> None:
        parts, error = batch.parts, batch.error
        if error is None:
            now = time.monotonic()
            for part, output in zip(parts, batch.outputs, strict=True):
                part.work.finish(output, now)
        elif len(parts) == 1 or isinstance(error, EngineFailedError):
            for part in parts:
                part.work.fail(error)
        self._later(partial(self._metrics.batch_ended, batch.times, time.perf_counter()))
        if len(parts) == 1 and not self._open and self._engine.begins_at_once:
            self._wakefulness.stay()  # under load nothing sleeps, and an engine that computes here needs the cores

    def _install(self, version: AdapterVersion) -> None:
        """Have ``version`` put into the slot that it was given."""
        assert version.slot is not None
        self._engine.install(version.slot, version.adapter, partial(self._install_ended, version))

    def _install_ended(self, version: AdapterVersion, error: Exception | None, seconds: float) -> None:
        """Called on the engine's threads."""
        self._loop.call_soon_threadsafe(self._installed, version, error, seconds)

    def _installed(self, version: AdapterVersion, error: Exception | None, seconds: float) -> None:
        if error is None:
            self._metrics.adapter_installed(seconds)
        self._waiting.install_ended(version, error)
        self._adapters.settle()
        self._turn()

    def _sweep(self) -> None:
        """End what has waited for too long, however long the engine takes over what it has."""
        now = time.monotonic()
        for work in list(self._open):
            if now >= work.deadline.at:
                work.fail(work.deadline.error())
        self._will_sweep = bool(self._open)
        if self._open:
            self._loop.call_later(SWEEP_S, self._sweep)
