"""What can wait until there is time for it, and takes less of that when it is done many times in a row."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

WAIT_S = 0.005
MOST = 32
"""So long small things may wait, and so many of them."""


class Afterwards:
    """Does small things soon, together: done between two requests each would find its code cold again, and delay the
    second. ``catch_up`` does them now. For the event loop alone."""

    def __init__(self) -> None:
        self._things: list[Callable[[], None]] = []
        self._will_catch_up = False

    def __call__(self, thing: Callable[[], None]) -> None:
        """Have ``thing`` done, on the running loop."""
        self._things.append(thing)
        if len(self._things) >= MOST:
            self.catch_up()
        elif not self._will_catch_up:
            self._will_catch_up = True
            asyncio.get_running_loop().call_later(WAIT_S, self._in_time)

    def catch_up(self) -> None:
        """Do all that waits."""
        things, self._things = self._things, []
        for thing in things:
            try:
                thing()
            except Exception:
                log.exception("something was not done afterwards")

    def _in_time(self) -> None:
        self._will_catch_up = False
        self.catch_up()
