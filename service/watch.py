"""What one forward tells of itself while it runs: for the metrics, and for its request's line in the log."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Self

NO_LAYER = "none"
"""The layer of a request that named none that is served."""


class ForwardWatch:
    """Times a forward from its headers, which came at ``started`` by ``time.monotonic`` (None: now), to its answer or
    to the error that ends it: once, by ``end`` or as a context manager.

    ``layer``       as metrics label it, once it is known
    ``num_tokens``  once they are known
    ``seconds``     once it has ended
    """

    __slots__ = ("_ended", "_started", "layer", "num_tokens", "seconds")

    def __init__(
        self, ended: "Callable[[ForwardWatch, BaseException | None], None]", started: float | None = None
    ) -> None:
        self.layer = NO_LAYER
        self.num_tokens = 0
        self.seconds = 0.0
        self._ended = ended
        self._started = time.monotonic() if started is None else started

    def __enter__(self) -> Self:
        current_forward.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error, time.monotonic())

    def end(self, error: BaseException | None, at: float) -> None:
        """It was answered, or ended by ``error``, ``at`` that moment of ``time.monotonic``."""
        self.seconds = at - self._started
        self._ended(self, error)


current_forward: ContextVar[ForwardWatch | None] = ContextVar("forward", default=None)
"""The forward that the running task's request is about, if it is about one."""
