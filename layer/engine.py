"""The one seam between what serves requests and what computes them: the ``Engine`` protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .adapter import KeptAdapter
from .errors import EngineError, RequestError
from .spec import LayerSpec, ModelSpec

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(slots=True, kw_only=True, eq=False)
class LayerBatch:
    """One forward of one layer over ``T`` tokens, host tensors, contiguous.

    ``hidden_states``  bf16 ``[T, H]``
    ``topk_ids``       int32 ``[T, top_k]`` of global expert ids, -1 for no expert; with
    ``topk_weights``   fp32 ``[T, top_k]``, used as they are; both or neither
    ``router_logits``  fp32 ``[T, E]``, routed by the checkpoint's method; not with top-k.
                       With neither, the checkpoint's own gate routes.
    ``token_slots``    int32 ``[T]`` adapter slot of each token, -1 for none; None: no adapter at all
    """

    layer: int
    hidden_states: Tensor
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    router_logits: Tensor | None = None
    token_slots: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.hidden_states.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of what it brings; not of ``token_slots``, which come later."""
        total = self.hidden_states.nbytes
        if self.topk_ids is not None and self.topk_weights is not None:
            total += self.topk_ids.nbytes + self.topk_weights.nbytes
        if self.router_logits is not None:
            total += self.router_logits.nbytes
        return total

    def part(self, start: int, stop: int) -> "LayerBatch":
        """Tokens ``start .. stop`` of the batch, as views."""

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return LayerBatch(
            layer=self.layer,
            hidden_states=self.hidden_states[start:stop],
            topk_ids=rows(self.topk_ids),
            topk_weights=rows(self.topk_weights),
            router_logits=rows(self.router_logits),
            token_slots=rows(self.token_slots),
        )

    @property
    def any_adapter(self) -> bool:
        """Whether any token has an adapter."""
        return self.token_slots is not None and bool((self.token_slots >= 0).any())

    def check(self, spec: LayerSpec, max_loras: int) -> bool:
        """Raise ``RequestError`` (its ``param`` naming the field) unless this fits ``spec``; returns ``any_adapter``,
        which the check has found out by then."""
        hidden, topk_ids, topk_weights = self.hidden_states, self.topk_ids, self.topk_weights
        tokens = hidden.shape[0]
        _expect("hidden_states", hidden, BF16, (tokens, spec.hidden_size))
        if (topk_ids is None) != (topk_weights is None):
            missing = "topk_ids" if topk_ids is None else "topk_weights"
            raise RequestError("topk_ids and topk_weights come together: one of them is missing", missing)
        if topk_ids is not None and self.router_logits is not None:
            raise RequestError("send topk_ids and topk_weights, or router_logits, not both", "router_logits")
        if topk_ids is not None and topk_weights is not None:
            _expect("topk_ids", topk_ids, INT32, (tokens, spec.top_k))
            _expect("topk_weights", topk_weights, FP32, (tokens, spec.top_k))
        if self.router_logits is not None:
            _expect("router_logits", self.router_logits, FP32, (tokens, spec.num_experts))
        if self.token_slots is not None:
            _expect("token_slots", self.token_slots, INT32, (tokens,))
        if topk_ids is not None:
            _expect_range("topk_ids", topk_ids, spec.num_experts)
        return self.token_slots is not None and _expect_range("token_slots", self.token_slots, max_loras) >= 0


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape:
        raise RequestError(
            f"{name} should be {dtype} of shape {list(shape)}, got {tensor.dtype} of shape {list(tensor.shape)}", name
        )


def _expect_range(name: str, tensor: Tensor, stop: int) -> int:
    """The largest value, -1 where there is none."""
    values: Any = tensor.numpy()  # numpy 2.5 declares no argmin without an axis
    if not values.size:
        return -1
    # half the time that min and max take to begin
    low, high = values.item(values.argmin()), values.item(values.argmax())
    if low < -1 or high >= stop:
        raise RequestError(f"{name} must lie in -1..{stop - 1}, got {low if low < -1 else high}", name)
    return int(high)


def check_slot(slot: int, max_loras: int) -> None:
    """Raise ``EngineError`` unless ``slot`` is one of the adapter slots ``0 .. max_loras - 1``."""
    if not 0 <= slot < max_loras:
        there = f"the slots are 0 to {max_loras - 1}" if max_loras else "there are none"
        raise EngineError(f"there is no adapter slot {slot}: {there}")


Lend = Callable[[int], memoryview | None]
"""As ``Engine.input_memory``."""


class Forward(Protocol):
    """A forward that was begun."""

    def result(self) -> Tensor:
        """Wait for the layer's output, bf16 ``[T, H]`` on the host; call once. Raises ``EngineError``."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A ``Forward`` that was computed before it was returned."""

    output: Tensor

    def result(self) -> Tensor:
        """The output."""
        return self.output


class Engine(Protocol):
    """Computes MoE layers and holds adapters in numbered slots.

    Calls come from three threads at most, and each says where it may come from others:

    * one begins forwards and makes all calls but the following;
    * one may wait for what was begun (``Forward.result``);
    * one may call ``install_adapter`` and ``remove_adapter``, one at a time, while forwards that do not use that slot
      are begun and computed. A forward that does has ended before the call is made, or is begun after it returned.

    A slot keeps its number for the engine's life; what is in it changes only through these two calls.
    """

    @property
    def model(self) -> ModelSpec:
        """What is served."""

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""

    @property
    def max_loras(self) -> int:
        """Number of adapter slots."""

    @property
    def max_lora_rank(self) -> int:
        """The largest adapter rank that a slot holds."""

    @property
    def depth(self) -> int:
        """How many forwards may be begun before the first of them is waited for."""

    @property
    def begins_at_once(self) -> bool:
        """Whether ``begin`` only starts a forward, in the time that its tensors take to be copied. Then it may be
        called from several threads, one at a time."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of the largest batch that is worth forming out of smaller ones; a batch may have more. Up to so many a
        token's bits do not depend on the batch's others; in a larger batch those of tokens with adapters may."""

    @property
    def most_tokens(self) -> int:
        """Tokens that are computed as one; a batch of more is computed in parts."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of a GPU's memory by what they are for, the same while the engine is used; none without a GPU."""

    def input_memory(self, num_bytes: int) -> memoryview | None:
        """Writable memory of ``num_bytes``, the first at a multiple of 64, that hidden states are best read from. None:
        there is none left, or any memory does as well.

        It is used again once the last view of it is gone. May be called on any thread.
        """

    def begin(self, batch: LayerBatch) -> Forward:
        """Start a forward; forwards compute, and are waited for, in the order begun.

        The batch's tensors may be changed once this returns, except hidden states in page-locked memory: a GPU may read
        those where they are until ``result`` has returned, and computes what it finds there, as with torch's
        non-blocking copies. They are kept alive until then. Raises as ``forward`` does.
        """

    def forward(self, batch: LayerBatch) -> Tensor:
        """``begin`` and wait: the layer's output, bf16 ``[T, H]`` on the host.

        A token whose experts are all -1 gets its shared experts' output alone (zero without any). Slots that are named
        must hold an adapter: the CPU's engine refuses others, a GPU's does not look and adds nothing.
        Raises ``LayerNotServedError``, ``RequestError``, or ``EngineError``.
        """

    def install_adapter(self, slot: int, adapter: KeptAdapter) -> None:
        """Put ``adapter``, an ``Adapter`` or what this kind of engine keeps, into ``slot`` whole: the next ``forward``
        sees all of it and nothing of what was there.

        Raises ``EngineError`` for a slot that is not there, as ``check_slot`` does and before it looks at anything
        else: whoever numbers slots is at fault, and no request. ``AdapterRefusedError`` if the adapter's rank exceeds
        ``max_lora_rank``. Both change nothing.
        """

    def remove_adapter(self, slot: int) -> None:
        """Leave ``slot`` empty; removing from an empty slot does nothing. Raises ``EngineError`` for a slot that is not
        there, likewise."""

    def plans(self, layer: int) -> Sequence[Mapping[str, Any]]:
        """Which execution plan runs at which token count, and why, for people to read."""

    def close(self) -> None:
        """Free everything; the engine is unusable afterwards."""
