"""Kernels compile side by side, by a thread to each as far as there are cores, and end together once one fails."""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_ASKED_BY_NVRTC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Halt:
    """Whether work under way has been called off. ``callback`` is the address of a C function that says so to NVRTC,
    which asks from time to time."""

    def __init__(self) -> None:
        self.called = False
        self._function = _ASKED_BY_NVRTC(lambda _payload, _reserved: int(self.called))
        self.callback = ctypes.cast(self._function, ctypes.c_void_p).value


def side_by_side(
    work: Callable[[Item, Halt], Result],
    items: Sequence[Item],
    *,
    ended: Callable[[Item, Result], None] | None = None,
    threads: int | None = None,
) -> None:
    """Do ``work``, which compiles, on all ``items``, by ``threads`` threads at most (None: as many as there are cores).

    ``ended`` is called on this thread with each item and what came of it, in the order of their ends. Raises the first
    error, of ``work`` or ``ended``, once all others have been called off and have ended: a process that ends while a
    thread of it compiles crashes, for the compiler is torn down under that thread.
    """
    halt = Halt()
    with ThreadPoolExecutor(max(min(threads or usable_cores(), len(items)), 1), "moelet-compile") as pool:
        futures = {pool.submit(work, item, halt): item for item in items}
        try:
            for future in as_completed(futures):
                result = future.result()
                if ended:
                    ended(futures[future], result)
        except BaseException:
            halt.called = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
