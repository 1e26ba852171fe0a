"""Shows how far a long step has come: a bar on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

log = logging.getLogger(__name__)
Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 5.0


def steps(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield ``items`` and show how many of them are done."""
    if sys.stderr.isatty():
        yield from track(items, description=what, console=Console(stderr=True))
        return
    last = started = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            log.info("%s: %d of %d", what, done, len(items))
            last = now
        yield item
    log.info("%s: all %d in %.1f s", what, len(items), time.monotonic() - started)
