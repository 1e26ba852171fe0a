"""What can wait until the answers of this turn of the event loop are on their way."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Afterwards:
    """Does small things on the loop's next turn, all of one turn together: cheaper than a turn's entry for each."""

    def __init__(self) -> None:
        self._things: list[Callable[[], None]] = []

    def __call__(self, thing: Callable[[], None]) -> None:
        """Have ``thing`` done, on the running loop."""
        if not self._things:
            asyncio.get_running_loop().call_soon(self._do)
        self._things.append(thing)

    def _do(self) -> None:
        things, self._things = self._things, []
        for thing in things:
            try:
                thing()
            except Exception:
                log.exception("something was not done afterwards")
