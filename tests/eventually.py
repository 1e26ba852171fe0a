"""Waits for what another thread or process brings about."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; an ``AssertionError`` where it does not ``within_s``."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.005)
