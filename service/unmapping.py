"""Gives mapped memory back on a thread of its own: the kernel frees page by page, which takes long for an adapter."""

import ctypes
import threading
import weakref
from queue import SimpleQueue

_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Unmapping:
    """The thread, from the first memory that it is to watch until ``close`` and the last of that has been given back.

    Whoever lets go of memory, the event loop above all, does not wait for it.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # may be put into by finalizers, on any thread
        self._watched = 0

    def watch(self, memory: object, address: int, size: int) -> None:
        """Unmap ``size`` bytes from ``address`` on, soon after ``memory`` is gone; for one thread at a time."""
        if not self._watched:
            threading.Thread(target=self._work, name="moelet-unmap", daemon=True).start()
        self._watched += 1
        weakref.finalize(memory, self._given.put, (address, size)).atexit = False

    def close(self) -> None:
        """Nothing more is to be watched."""
        self._given.put(None)

    def _work(self) -> None:
        opened, returned = True, 0
        while opened or returned < self._watched:
            if (given := self._given.get()) is None:
                opened = False
            else:
                _libc.munmap(*given)
                returned += 1
