"""The one thread that owns the engine: every call to an ``Engine`` runs here, in the order submitted."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..layer.engine import Engine
from ..layer.errors import EngineFailedError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineThread:
    """Opens an engine on a thread of its own and runs work on it there, one piece at a time.

    ``failure`` is the error after which the device can do nothing any more, or None; from then on
    all work ends in ``EngineFailedError``. ``on_failure`` is called once, on that thread.
    """

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moelet-engine")
        self.failure: EngineFailedError | None = None
        self.on_failure: Callable[[EngineFailedError], None] = lambda _error: None
        try:
            self._engine = self._executor.submit(open_engine).result()
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        self.model = self._engine.model
        self.device = self._engine.device
        self.max_loras = self._engine.max_loras
        self.max_lora_rank = self._engine.max_lora_rank

    def submit(self, work: Callable[[Engine], Result]) -> "Future[Result]":
        """Queue ``work`` behind all that was submitted before it."""
        return self._executor.submit(self._run, work)

    async def run(self, work: Callable[[Engine], Result]) -> Result:
        """``submit`` and wait, from the event loop. Work that has begun is not cancelled with its caller."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Let what was submitted finish, close the engine and end the thread."""
        try:
            self._executor.submit(self._engine.close).result()
        finally:
            self._executor.shutdown()

    def _run(self, work: Callable[[Engine], Result]) -> Result:
        if self.failure is not None:
            raise EngineFailedError(str(self.failure)) from self.failure
        try:
            return work(self._engine)
        except EngineFailedError as error:
            self.failure = error
            log.critical("the engine failed for good: %s", error)
            self.on_failure(error)
            raise
