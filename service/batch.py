"""One engine call: the parts of several forwards laid behind each other, and its output cut up again."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..layer.adapter_version import AdapterVersion
from ..layer.engine import LayerBatch, Lend
from ..layer.errors import EngineError
from .engine_thread import FlightTimes
from .rows import Output, Rows
from .work import Part

LENT_BYTES = 32 << 10
"""The smallest hidden states that take memory of the engine's: fewer it copies in less time."""
REMEMBERED = 1024
REMEMBERED_TOKENS = 256
"""How many tensors of slots are kept: of parts alone in their batch, of up to so many tokens, all with one adapter."""


class Batch:
    """Some parts of one key, which hold the slots that their adapters are in.

    ``outputs``    the rows of each part, once computed
    ``error``      why there are none, once it failed
    ``taken_at``   when it was formed, by ``time.monotonic``

    Made and taken back on the event loop; in between the engine's threads have it.
    """

    def __init__(self, parts: Sequence[Part], landed: "Callable[[Batch], None]") -> None:
        self.parts = parts
        self.num_tokens = sum([part.num_tokens for part in parts])
        self.outputs: Sequence[Rows] = ()
        self.error: Exception | None = None
        self.taken_at = time.monotonic()
        self.times = FlightTimes()
        self._landed = landed

    def assemble(self, lend: Lend) -> LayerBatch:
        """All tokens as one batch. Hidden states of several parts are laid behind each other in memory that ``lend``
        gives, if they are many and it does."""
        first = self.parts[0].batch
        slots = self._token_slots() if any(part.versions for part in self.parts) else None
        if slots is None and len(self.parts) == 1:
            return first
        batches = [part.batch for part in self.parts]
        return LayerBatch(
            layer=first.layer,
            hidden_states=_joined([b.hidden_states for b in batches], lend),
            topk_ids=None if first.topk_ids is None else _cat([b.topk_ids for b in batches]),
            topk_weights=None if first.topk_weights is None else _cat([b.topk_weights for b in batches]),
            router_logits=None if first.router_logits is None else _cat([b.router_logits for b in batches]),
            token_slots=slots,
        )

    def finish(self, output: Tensor) -> None:
        """Cut ``output``, bf16 ``[T, H]``, into that of each part, and hand it back. Raises ``EngineError``."""
        if output.shape[0] != self.num_tokens:  # `len` of a tensor takes four times as long
            raise EngineError(f"the engine answered {self.num_tokens} tokens with {output.shape[0]}")
        whole, outputs, start = Output(output), list[Rows](), 0
        for part in self.parts:
            rows = Rows(whole, start, start := start + part.num_tokens)
            outputs.append(rows)
            if part.rows is not None:
                part.work.join(part, rows.tensor)
        self.outputs = outputs
        self._landed(self)

    def fail(self, error: Exception) -> None:
        """Hand it back without an output."""
        self.error = error
        self._landed(self)

    def _token_slots(self) -> Tensor:
        """The slot of each token, int32 ``[T]``, -1 for none."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.token_versions is None and self.num_tokens <= REMEMBERED_TOKENS:
            return _one_slot(_slot(first.versions[0]), self.num_tokens)
        slots = np.full(self.num_tokens, -1, np.int32)
        start = 0
        for part in self.parts:
            stop = start + part.num_tokens
            if part.token_versions is not None:
                slots[start:stop] = np.array([*map(_slot, part.versions), -1], np.int32)[part.token_versions.numpy()]
            elif part.versions:
                slots[start:stop] = _slot(part.versions[0])
            start = stop
        return torch.from_numpy(slots)


@lru_cache(REMEMBERED)
def _one_slot(slot: int, num_tokens: int) -> Tensor:
    """The slots of so many tokens that all have one adapter; nobody writes to them."""
    return torch.full((num_tokens,), slot, dtype=torch.int32)


def _slot(version: AdapterVersion) -> int:
    assert version.slot is not None, f"version {version.version} of {version.name!r} was not placed"
    return version.slot


def _joined(hidden: Sequence[Tensor], lend: Lend) -> Tensor:
    num_bytes = sum([each.nbytes for each in hidden])
    memory = lend(num_bytes) if len(hidden) > 1 and num_bytes >= LENT_BYTES else None
    if memory is None:
        return _cat(hidden)
    joined = torch.frombuffer(memory, dtype=torch.bfloat16).view(-1, hidden[0].shape[1])
    return torch.cat(list(hidden), out=joined)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor:
    """The rows of all ``tensors``, none of which is None where the first is not."""
    there = [tensor for tensor in tensors if tensor is not None]
    return there[0] if len(there) == 1 else torch.cat(there)
