"""The CPU engine: the layer in torch, batched by expert, the same bits for a token in any batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter, KeptAdapter, LayerAdapter
from .cpu_layer import layer_output
from .engine import Finished, Forward, LayerBatch, check_slot
from .errors import AdapterRefusedError, EngineError, RequestError
from .spec import LayerSpec, ModelSpec
from .weights import LayerWeights

MAX_SLOT_ROWS = 16384
"""Slot rows computed at a time: bounds the scratch memory of a long batch and changes no bit."""


class ReferenceEngine:
    """Computes layers on the CPU, in fp32 from bf16 weights, activations and adapters.

    The layer is that of ``oracle.layer_forward``; everything between the bf16 inputs and the one
    rounding of the output is fp32. A token's output depends, bit for bit, on that token, its routing
    and its adapter alone: neither on the other tokens, their adapters or their number, nor on the
    run. Machines with other CPUs may round sums otherwise.

    ``weights`` may be filled while this exists; a layer can be computed once its weights are there.
    They are used as they are, without a second copy. As many threads run as torch is set to use.
    """

    device = "cpu"
    depth = 1
    begins_at_once = False
    batch_tokens = most_tokens = 256

    def __init__(
        self,
        model: ModelSpec,
        weights: Mapping[int, LayerWeights],
        *,
        max_loras: int = 8,
        max_lora_rank: int = 64,
    ) -> None:
        self.model = model
        self.max_loras = max_loras
        self.max_lora_rank = max_lora_rank
        self._weights = weights
        self._slots: list[Adapter | None] = [None] * max_loras

    def input_memory(self, num_bytes: int) -> memoryview | None:  # noqa: ARG002
        """None: any memory does."""
        return None

    def begin(self, batch: LayerBatch) -> Forward:
        """``forward``, done before this returns."""
        return Finished(self.forward(batch))

    @torch.no_grad()
    def forward(self, batch: LayerBatch) -> Tensor:
        """The layer's output, bf16 ``[T, H]``.

        A token whose experts are all -1 gets its shared experts' output alone (zero without any).
        Raises ``LayerNotServedError``; ``RequestError`` if the batch does not fit the layer or names
        an empty slot; ``EngineError`` if the layer's weights are not there yet.
        """
        spec = self.model.layer(batch.layer)
        batch.check(spec, self.max_loras)
        weights = self._layer_weights(spec)
        adapters = self._layer_adapters(batch)
        out = torch.empty_like(batch.hidden_states)
        step = max(1, MAX_SLOT_ROWS // spec.top_k)
        for start in range(0, batch.num_tokens, step):
            part = batch.part(start, start + step)
            out[start : start + step] = layer_output(spec, weights, part, adapters)
        return out

    def install_adapter(self, slot: int, adapter: KeptAdapter) -> None:
        """Put ``adapter``, an ``Adapter``, into ``slot``, in place of what is there.

        Raises ``EngineError`` for a slot that is not there, ``AdapterRefusedError`` if the adapter's rank exceeds
        ``max_lora_rank``.
        """
        check_slot(slot, self.max_loras)
        assert isinstance(adapter, Adapter)
        if adapter.max_rank > self.max_lora_rank:
            raise AdapterRefusedError("r", f"a rank of at most {self.max_lora_rank}", str(adapter.max_rank))
        self._slots[slot] = adapter

    def remove_adapter(self, slot: int) -> None:
        """Leave ``slot`` empty; removing from an empty slot does nothing. Raises ``EngineError`` for a slot that is not
        there."""
        check_slot(slot, self.max_loras)
        self._slots[slot] = None

    def plans(self, layer: int) -> Sequence[Mapping[str, Any]]:
        """The one plan there is. Raises ``LayerNotServedError``."""
        self.model.layer(layer)
        why = "there is one way to run the layer on the CPU"
        return [{"tokens": self.most_tokens, "captured": False, "plan": "reference", "why": why}]

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """None of a GPU's."""
        return {}

    def close(self) -> None:
        """Let go of weights and adapters; the engine is unusable afterwards."""
        self._weights = {}
        self._slots = [None] * self.max_loras

    def _layer_weights(self, spec: LayerSpec) -> LayerWeights:
        weights = self._weights.get(spec.index)
        if weights is None:
            raise EngineError(f"the weights of layer {spec.index} are not loaded")
        weights.check(spec)
        return weights

    def _layer_adapters(self, batch: LayerBatch) -> dict[int, LayerAdapter]:
        """What the adapters of this batch change in this layer, by slot."""
        if batch.token_slots is None:
            return {}
        found: dict[int, LayerAdapter] = {}
        for slot in (batch.token_slots + 1).bincount()[1:].nonzero().flatten().tolist():
            adapter = self._slots[slot]
            if adapter is None:
                raise RequestError(f"adapter slot {slot} is empty", "token_slots")
            if batch.layer in adapter.layers:
                found[slot] = adapter.layers[batch.layer]
        return found
