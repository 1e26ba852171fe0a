"""A thread that does what it is given, one thing after the other, given at a fraction of what an executor takes."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Worker:
    """One thread called ``name``, from its making until ``close``."""

    def __init__(self, name: str) -> None:
        self._undone = 0
        self._counting = threading.Lock()
        self._given: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all is done that was given; true only until somebody gives more."""
        return self._undone == 0

    def give(self, work: Callable[[], object]) -> None:
        """Have ``work`` done behind all that was given before; an error of its ends in the log."""
        with self._counting:
            self._undone += 1
        self._given.put(work)

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """``give`` it, and what it comes to; a future that was cancelled before its turn is left out."""
        future: Future[Result] = Future()
        self.give(partial(_fulfil, future, work))
        return future

    def close(self, *, wait: bool = True) -> None:
        """End the thread once it has done what it was given, and wait for that."""
        self._given.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (work := self._given.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("what the thread %s was given failed", self._thread.name)
            with self._counting:
                self._undone -= 1
            del work  # what it holds, while the next is waited for


def _fulfil(future: "Future[Result]", work: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits raises it
        future.set_exception(error)
