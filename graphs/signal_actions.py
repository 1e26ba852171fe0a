"""What the C library does on SIGINT and SIGTERM, kept over work that changes it for the whole process."""

import ctypes
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ROOM = 1024
"""Bytes that a ``struct sigaction`` fits into, whatever the C library."""
SECONDS_BETWEEN_LOOKS = 1e-4


def keeping_signal_actions(work: Callable[[], Result]) -> Result:
    """Do ``work``, on a thread of its own, undo at once whatever it does to those actions, until it has ended, and
    return what it does.

    For one thread at a time. Raises what ``work`` raises, and what a signal's handler does meanwhile.
    """
    sigaction = ctypes.CDLL(None).sigaction
    actions = {int(number): ctypes.create_string_buffer(_ROOM) for number in _SIGNALS}
    for number, action in actions.items():
        sigaction(number, None, action)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        try:
            _keep(sigaction, actions, done)
        finally:  # a handler may have raised: the work goes on all the same
            _keep(sigaction, actions, done)
    return done.result()


def _keep(sigaction: Callable[..., object], actions: Mapping[int, Any], done: "Future[Any]") -> None:
    working = True
    while working:
        working = not done.done()
        for number, action in actions.items():
            sigaction(number, action, None)
        time.sleep(SECONDS_BETWEEN_LOOKS)
