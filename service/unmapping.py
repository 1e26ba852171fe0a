"""Gives mapped memory back on a thread of its own: the kernel frees page by page, which takes long for an adapter."""

import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


PAUSE_S = 0.05
"""So long memory waits for more of it: to wake a thread for each takes longer than to give it back."""


class Mapped:
    """``size`` bytes of mapped memory from ``address`` on, until nobody refers to this any more."""

    __slots__ = ("_let_go", "address", "size")

    def __init__(self, address: int, size: int, let_go: Callable[[tuple[int, int]], None]) -> None:
        self.address = address
        self.size = size
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go((self.address, self.size))


class Unmapping:
    """The thread, from the first memory that it is to watch until ``close`` and the last of that has been given back.

    Whoever lets go of memory, the event loop above all, does not wait for it.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # may be put into by finalizers, on any thread
        self._watched = 0

    def watched(self, address: int, size: int) -> Mapped:
        """The memory there, which is unmapped soon after this is gone; for one thread at a time."""
        if not self._watched:
            threading.Thread(target=self._work, name="moelet-unmap", daemon=True).start()
        self._watched += 1
        return Mapped(address, size, self._given.put)

    def close(self) -> None:
        """Nothing more is to be watched."""
        self._given.put(None)

    def _work(self) -> None:
        opened, returned = True, 0
        while opened or returned < self._watched:
            given = [self._given.get()]
            if opened:
                time.sleep(PAUSE_S)
            while not self._given.empty():
                given.append(self._given.get())
            for place in given:
                if place is None:
                    opened = False
                else:
                    _libc.munmap(*place)
                    returned += 1
