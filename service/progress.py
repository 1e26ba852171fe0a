"""Shows how far long steps have come: bars on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TaskID

log = logging.getLogger(__name__)
Item = TypeVar("Item")

Report = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown() -> Iterator[Report]:
    """A ``Report`` that people see until the block ends; it may be called on any thread, by one at a time."""
    if not sys.stderr.isatty():
        yield LogLines()
        return
    with Progress(console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield report


class LogLines:
    """Reports as log lines: the end of each kind of step, and one every few seconds until then."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last.setdefault(what, now) >= SECONDS_BETWEEN_LINES:
            self._last[what] = now
            log.info("%s: %d of %d", what, done, total)


def steps(items: Sequence[Item], what: str, report: Report) -> Iterator[Item]:
    """Yield ``items`` and report how many of them are done."""
    for done, item in enumerate(items):
        report(what, done, len(items))
        yield item
    if items:
        report(what, len(items), len(items))
