"""Whether the service takes work: before it is ready, while it serves, and while it drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..layer.errors import EngineFailedError
from .errors import UnavailableError


class Lifecycle:
    """Counts the forwards, loads and unloads in flight and knows whether new ones may come; used on the
    event loop alone.

    ``started``   the service answers forwards
    ``draining``  it was told to stop: what runs is finished, nothing new is admitted
    ``failure``   the engine failed for good, or None
    """

    def __init__(self) -> None:
        self.started = False
        self.draining = False
        self.failure: EngineFailedError | None = None
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether a forward would be admitted."""
        return self.started and not self.draining and self.failure is None

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``draining`` or ``failed``."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self.started else "starting"

    def check_admission(self) -> None:
        """Raise ``EngineFailedError`` or ``UnavailableError`` unless new work may come."""
        if self.failure is not None:
            raise EngineFailedError(f"the engine failed for good and the service must be restarted: {self.failure}")
        if not self.ready:
            raise UnavailableError(f"the service is {self.state} and takes no new work")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place in flight. Raises as ``check_admission`` does."""
        self.check_admission()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    def begin_drain(self) -> None:
        """Admit nothing from here on."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()
