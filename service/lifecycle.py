"""Whether the service takes work: before it is ready, while it serves, and while it drains."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from ..layer.errors import EngineFailedError
from .errors import UnavailableError


class _Place(AbstractContextManager[None]):
    """What every request enters; it keeps nothing of its own, so that one serves them all."""

    __slots__ = ("_enter", "_leave")

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


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
        self._place = _Place(self.enter, self.leave)

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
        if self.ready:
            return
        self.check_alive()
        raise UnavailableError(f"the service is {self.state} and takes no new work")

    def check_alive(self) -> None:
        """Raise ``EngineFailedError`` once the engine has failed for good."""
        if self.failure is not None:
            raise EngineFailedError(f"the engine failed for good and the service must be restarted: {self.failure}")

    def admit(self) -> AbstractContextManager[None]:
        """``enter`` and ``leave`` as a context."""
        return self._place

    def enter(self) -> None:
        """Take a place in flight, until ``leave``. Raises as ``check_admission`` does."""
        self.check_admission()
        self.in_flight += 1
        if self.in_flight == 1:
            self._idle.clear()

    def leave(self) -> None:
        """Give a place back."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def begin_drain(self) -> None:
        """Admit nothing from here on."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()
