"""One admitted forward on its way through the engine, and the parts of it that go through apart."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..layer.adapter_version import AdapterVersion
from ..layer.engine import LayerBatch
from .call import Answer
from .deadline import Deadline
from .rows import Rows

log = logging.getLogger(__name__)

Key = tuple[int, bool, bool]
"""What forwards of one batch have in common: the layer, and whether top-k or router logits were sent."""


class Work:
    """One admitted forward.

    ``batch``      what to compute, its ``token_slots`` open
    ``versions``   the adapter versions that it holds
    ``deadline``   when it is given up
    ``over``       whether it has ended, or nobody waits for it any more
    ``output``     its rows, once they are computed
    ``error``      why there is none, until that was told
    ``waiting``    how many of its parts wait for the engine
    ``begun``      whether one of them has entered a batch: from then on it does not wait, whatever its others do

    ``ended`` is called once it has an output or an error, on the event loop: at once with an output, and with an error,
    which comes up wherever something is decided about what waits, not before the loop's next turn.
    """

    __slots__ = (
        "_ended",
        "_joined",
        "_missing",
        "batch",
        "begun",
        "deadline",
        "error",
        "num_tokens",
        "output",
        "over",
        "queued_at",
        "token_versions",
        "versions",
        "waiting",
    )

    def __init__(
        self,
        batch: LayerBatch,
        versions: tuple[AdapterVersion, ...],
        token_versions: Tensor | None,
        deadline: Deadline,
        ended: "Callable[[Work], None]",
    ) -> None:
        self.batch = batch
        self.num_tokens = batch.num_tokens
        self.versions = versions
        self.token_versions = token_versions
        self.deadline = deadline
        self.over = False
        self.output: Rows | None = None
        self.error: Exception | None = None
        self.queued_at = time.monotonic()
        self.waiting = 0
        self.begun = False
        self._ended: Callable[[Work], None] | None = ended
        self._missing = 0
        self._joined: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether all of it waits for the engine."""
        return self.waiting > 0 and not self.begun

    def parts(self, most_tokens: int) -> list["Part"]:
        """All of it, as parts of at most ``most_tokens``."""
        tokens = self.num_tokens
        if tokens <= most_tokens:
            parts = [Part(self, self.batch, self.versions, self.token_versions, None)]
        else:
            parts = [self._slice(start, min(start + most_tokens, tokens)) for start in range(0, tokens, most_tokens)]
        self._missing = len(parts)
        return parts

    def _slice(self, start: int, stop: int) -> "Part":
        rows = slice(start, stop)
        batch = self.batch.part(start, stop)
        if self.token_versions is None:
            return Part(self, batch, self.versions, None, rows)
        return Part(self, batch, *used(self.versions, self.token_versions[rows]), rows)

    def add_part(self) -> None:
        """A part was split in two."""
        self._missing += 1

    def join(self, part: "Part", output: Tensor) -> None:
        """Keep the output of ``part`` of several; not on the event loop, where a large copy would be felt."""
        if part.rows is not None and not self.over:
            if self._joined is None:
                self._joined = torch.empty_like(self.batch.hidden_states)
            self._joined[part.rows] = output

    def finish(self, output: Rows, now: float) -> None:
        """One more part is computed, as ``output``; the last one answers, unless nobody waits any more."""
        self._missing -= 1
        if self._missing or self.over:
            return
        if now >= self.deadline.at:
            self.fail(self.deadline.error())
            return
        self.over = True
        self.output = output if self._joined is None else Rows.of(self._joined)
        self._tell()

    def fail(self, error: Exception) -> None:
        """End it with ``error``, unless it has ended."""
        if not self.over:
            self.over, self.error = True, error
            asyncio.get_running_loop().call_soon(self._tell)

    def forget(self) -> bool:
        """Nobody waits for it any more, and ``ended`` is not called; whether it would have been."""
        waited, self._ended = self._ended is not None, None
        self.over = True
        return waited

    def _tell(self) -> None:
        ended, self._ended = self._ended, None
        try:
            if ended is not None:
                ended(self)
        except Exception:  # others of the batch are answered in the same turn of the loop
            log.exception("what waited for a forward could not take its end")
        self.error = None  # its traceback may hold this


def answer_of(work: Work) -> Answer:
    """What ``work``, which has an output, came to."""
    assert work.output is not None
    return Answer.of(work.batch.layer, work.output, work.versions)


class Part:
    """What goes through the engine in one call: all tokens of a work, or some.

    ``batch``           its tokens, their ``token_slots`` open
    ``versions``        the adapter versions that they use
    ``token_versions``  int64 ``[t]``, which of ``versions`` each token uses, -1 for none; None: all use the only
                        one, or there is none
    ``rows``            which tokens of the work they are; None: all
    ``passes``          how many batches took later parts before this one
    ``first``           it is in a batch, and before it nothing of its work was in one
    ``alone``           it shares no batch: one that it was in failed
    ``asked_at``        the round in which it asked for slots
    ``holds``           whether it holds the slots of ``versions``
    """

    __slots__ = (
        "alone",
        "asked_at",
        "batch",
        "first",
        "holds",
        "num_bytes",
        "num_tokens",
        "passes",
        "rows",
        "token_versions",
        "versions",
        "work",
    )

    def __init__(
        self,
        work: Work,
        batch: LayerBatch,
        versions: tuple[AdapterVersion, ...],
        token_versions: Tensor | None,
        rows: slice | Tensor | None,
    ) -> None:
        self.work = work
        self.batch = batch
        self.versions = versions
        self.token_versions = token_versions
        self.rows = rows
        self.num_tokens = batch.num_tokens
        self.num_bytes = batch.num_bytes
        self.passes = 0
        self.first = False
        self.alone = False
        self.asked_at = 0
        self.holds = False

    @property
    def key(self) -> Key:
        """Parts of one key may share a batch."""
        batch = self.batch
        return batch.layer, batch.topk_ids is not None, batch.router_logits is not None

    def split(self, group: Sequence[AdapterVersion]) -> "tuple[Part, Part]":
        """The tokens that use one of ``group``, which is some of ``versions``, or none; and the others."""
        assert self.token_versions is not None
        inside = torch.tensor([*(version in group for version in self.versions), True])
        chosen = inside[self.token_versions]
        self.work.add_part()
        first, second = (self._select(rows.nonzero().flatten()) for rows in (chosen, ~chosen))
        first.alone = second.alone = self.alone
        return first, second

    def _select(self, rows: Tensor) -> "Part":
        assert self.token_versions is not None
        batch, within = self.batch, rows

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[within]

        picked = LayerBatch(
            layer=batch.layer,
            hidden_states=batch.hidden_states[within],
            topk_ids=of(batch.topk_ids),
            topk_weights=of(batch.topk_weights),
            router_logits=of(batch.router_logits),
        )
        if isinstance(self.rows, slice):
            rows = within + self.rows.start
        elif self.rows is not None:
            rows = self.rows[within]
        return Part(self.work, picked, *used(self.versions, self.token_versions[within]), rows)


def used(versions: tuple[AdapterVersion, ...], tokens: Tensor) -> tuple[tuple[AdapterVersion, ...], Tensor]:
    """Those of ``versions`` that occur in ``tokens``, and ``tokens`` in terms of them."""
    there = (tokens + 1).bincount(minlength=len(versions) + 1)[1:].nonzero().flatten()
    places = torch.full((len(versions) + 1,), -1)
    places[there] = torch.arange(len(there))
    return tuple(versions[i] for i in there.tolist()), places[tokens]
