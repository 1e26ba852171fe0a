"""Keeps the event loop from sleeping just after an answer, when its client is likely to ask again."""

import asyncio
import time
from collections.abc import Callable

from ..graphs.side_by_side import usable_cores

STAY_S = 2e-4
"""So long the loop stays awake after an answer: a client that asks again at once does so within it."""


class Wakefulness:
    """Has ``loop`` look for requests without a pause for ``STAY_S`` after ``stay``, or until it is ``busy``.

    A thread that sleeps finds its core's clock low and its caches cold, and a request that it then answers takes twice
    as long. The loop stays awake only where a second core is there for the client, and lets other threads have their
    turn each time it looks. Used on that loop alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, busy: Callable[[], object]) -> None:
        self._loop = loop
        self._busy = busy
        self._awake = False
        self._until = 0.0
        self._may_stay = usable_cores() > 1

    def stay(self) -> None:
        """An answer is written: do not sleep yet."""
        if not self._may_stay:
            return
        self._until = time.monotonic() + STAY_S
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._busy() or time.monotonic() >= self._until:
            self._awake = False
        else:
            self._loop.call_soon(self._look)
