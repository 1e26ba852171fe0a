"""A forward that was put on a stream, until its output is there: what is waited for, and what is held until then."""

from collections.abc import Callable

from torch import Tensor

from ..layer.errors import EngineError
from .streams import Event

TAKEN, LOST, UNDER_WAY = range(3)
"""How memory that a forward passed through can be had again: at once, sooner than that of another, or not yet."""


class Arrival:
    """A forward that was put on a stream: ``result`` waits for its output. ``enter`` lets its thread use the device.

    ``finish`` makes the output, of a copy or, where there is a place for those that are ``lost``, of memory kept for
    it. One is lost that was waited for in vain: it may be written at any time, and its memory is not used again.
    ``state`` is ``LOST`` until all of the forward is on the stream, then ``UNDER_WAY`` until ``result`` ends.
    ``reads`` is what the device reads from the caller's own memory, held until it was waited for: where that was in
    vain it may be read at any time.
    """

    __slots__ = ("_done", "_enter", "_finish", "_lost", "reads", "state")

    def __init__(
        self,
        done: Event,
        finish: Callable[[], Tensor],
        enter: Callable[[], None] | None,
        *,
        lost: list[Tensor] | None,
        reads: Tensor | None = None,
    ) -> None:
        self._done = done
        self._finish = finish
        self._enter = enter
        self._lost = lost
        self.reads = reads
        self.state = LOST

    @property
    def under_way(self) -> bool:
        """Whether the output is not there, or not taken, and somebody may wait for it."""
        return self.state == UNDER_WAY

    def result(self) -> Tensor:
        """The output, bf16 ``[num_tokens, H]`` on the host; call once, from any thread.

        Raises ``EngineError``, a second call too: its memory may be that of another forward by then.
        """
        if self.state != UNDER_WAY:
            raise EngineError("the output of a forward is asked for once, and this one was asked for before")
        ended = LOST
        try:
            output = self._waited_for()
            self.reads = None
            ended = TAKEN
        finally:
            self.state = ended
        return output

    def _waited_for(self) -> Tensor:
        if self._enter is not None:
            self._enter()
        if self._lost is None:
            self._done.synchronize()
            return self._finish()
        output = self._finish()  # only the memory is looked at, and the GPU still computes
        try:
            self._done.synchronize()
        except BaseException:
            self._lost.append(output)
            raise
        return output
