"""The threads that speak to the engine: one begins forwards, one waits for them, and one fills adapter slots beside."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from ..layer.adapter import KeptAdapter
from ..layer.engine import Engine, Finished, Forward, LayerBatch, Lend
from ..layer.errors import EngineFailedError
from .worker import Worker

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(slots=True)
class FlightTimes:
    """When a forward's turn came, when it was begun, and when it ended; seconds of ``time.perf_counter``, 0 for what
    did not happen."""

    started: float = 0.0
    begun: float = 0.0
    ended: float = 0.0


class Flight(Protocol):
    """A forward that an ``EngineThread`` is given. Its methods are called off the event loop."""

    times: FlightTimes
    num_tokens: int

    def assemble(self, lend: Lend) -> LayerBatch:
        """What to compute, in memory that ``lend`` gives where that is made anew."""

    def finish(self, output: Tensor) -> None:
        """Take the output."""

    def fail(self, error: Exception) -> None:
        """Take the error."""


SMALL_TOKENS = 64
"""Of a forward that is begun on the event loop: its copy is not felt there."""


class EngineThread:
    """Opens an engine on a thread of its own and runs work on it there, in the order submitted.

    Forwards are begun on that thread and, where the engine takes several at once, waited for on another, so
    that the next is begun while one is waited for. A small one that an engine begins at once is begun where ``begin``
    is called while the thread has nothing to do: handing it over would take longer. Adapters are put into slots on a
    third, in the order asked for, so that no forward waits for that.

    ``failure`` is the error after which the device can do nothing any more, or None; from then on
    all work ends in ``EngineFailedError``. ``on_failure`` is called once, on any of the threads.
    """

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._caller = Worker("moelet-engine")
        self.failure: EngineFailedError | None = None
        self.on_failure: Callable[[EngineFailedError], None] = lambda _error: None
        try:
            self._engine = self._caller.submit(open_engine).result()
        except BaseException:
            self._caller.close(wait=False)
            raise
        self.model = self._engine.model
        self.device = self._engine.device
        self.max_loras = self._engine.max_loras
        self.max_lora_rank = self._engine.max_lora_rank
        self.depth = self._engine.depth
        self.batch_tokens = self._engine.batch_tokens
        self.most_tokens = self._engine.most_tokens
        self._waiter = Worker("moelet-output") if self.depth > 1 else None
        self._installer = Worker("moelet-slots")
        self._failing = threading.Lock()

    @property
    def begins_at_once(self) -> bool:
        """Whether the engine only starts forwards, which are computed elsewhere."""
        return self._engine.begins_at_once

    def input_memory(self, num_bytes: int) -> memoryview | None:
        """``Engine.input_memory``, on any thread; None once the device has failed."""
        return None if self.failure else self._engine.input_memory(num_bytes)

    def submit(self, work: Callable[[Engine], Result]) -> "Future[Result]":
        """Queue ``work`` behind all that was submitted before it."""
        return self._caller.submit(partial(self._run, work))

    async def run(self, work: Callable[[Engine], Result]) -> Result:
        """``submit`` and wait, from the event loop. Work that has begun is not cancelled with its caller."""
        return await asyncio.wrap_future(self.submit(work))

    def begin(self, flight: Flight) -> None:
        """Queue ``flight``; it is finished, or failed, in the end. At most ``depth`` may be neither."""
        if flight.num_tokens <= SMALL_TOKENS and self.begins_at_once and self._caller.idle:
            self._begin(flight)
        else:
            self._caller.give(partial(self._begin, flight))

    def install(self, slot: int, adapter: KeptAdapter, ended: Callable[[Exception | None, float], None]) -> None:
        """Queue that ``adapter`` be put into ``slot``, which no flight may use that is not begun after the end.

        ``ended`` is then called off the event loop, with what went wrong, if anything, and how many seconds it took.
        """
        self._installer.give(partial(self._install, slot, adapter, ended))

    def clear(self, slot: int) -> "Future[None]":
        """Queue that ``slot`` be emptied, behind the installs asked for before."""
        return self._installer.submit(partial(self._run, lambda engine: engine.remove_adapter(slot)))

    def close(self) -> None:
        """Let what was submitted finish, close the engine and end the threads."""
        try:
            if self._waiter is not None:
                self._caller.submit(lambda: None).result()
                self._waiter.close()
            self._installer.close()
            self._caller.submit(self._engine.close).result()
        finally:
            self._caller.close()

    def _begin(self, flight: Flight) -> None:
        def begun(engine: Engine) -> Forward:
            times = flight.times
            times.started = time.perf_counter()
            forward = engine.begin(flight.assemble(engine.input_memory))
            times.begun = time.perf_counter()
            return forward

        try:
            forward = self._run(begun)
            if isinstance(forward, Finished):
                flight.times.ended = flight.times.begun
                flight.finish(forward.output)
                return
        except Exception as error:  # noqa: BLE001 - it is the flight's
            flight.fail(error)
            return
        if self._waiter is None:
            self._wait(flight, forward)
        else:
            self._waiter.give(partial(self._wait, flight, forward))

    def _wait(self, flight: Flight, forward: Forward) -> None:
        try:
            output = self._run(lambda _engine: forward.result())
            flight.times.ended = time.perf_counter()
            flight.finish(output)
        except Exception as error:  # noqa: BLE001 - it is the flight's
            flight.fail(error)

    def _install(self, slot: int, adapter: KeptAdapter, ended: Callable[[Exception | None, float], None]) -> None:
        started = time.perf_counter()
        try:
            self._run(lambda engine: engine.install_adapter(slot, adapter))
        except Exception as error:  # noqa: BLE001 - it is whose adapter it is, and no variable's behind this
            ended(error, time.perf_counter() - started)
        else:
            ended(None, time.perf_counter() - started)

    def _run(self, work: Callable[[Engine], Result]) -> Result:
        if self.failure is not None:
            raise EngineFailedError(str(self.failure)) from self.failure
        try:
            return work(self._engine)
        except EngineFailedError as error:
            self._fail(error)
            raise

    def _fail(self, error: EngineFailedError) -> None:
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        log.critical("the engine failed for good: %s", error)
        self.on_failure(error)
