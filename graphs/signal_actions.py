"""What the C library does on SIGINT and SIGTERM, kept over work that changes it for the whole process."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ROOM = 1024
"""Bytes that a ``struct sigaction`` fits into, whatever the C library."""
SECONDS_BETWEEN_LOOKS = 1e-4


def keeping_signal_actions(work: Callable[[], object]) -> None:
    """Do ``work``, on a thread of its own, and undo at once whatever it does to those actions."""
    sigaction = ctypes.CDLL(None).sigaction
    actions = {int(number): ctypes.create_string_buffer(_ROOM) for number in _SIGNALS}
    for number, action in actions.items():
        sigaction(number, None, action)
    thread = threading.Thread(target=work)
    thread.start()
    working = True
    while working:
        working = thread.is_alive()
        for number, action in actions.items():
            sigaction(number, action, None)
        time.sleep(SECONDS_BETWEEN_LOOKS)
