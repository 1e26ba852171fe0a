"""The modules that stand where a transformers MoE block had its experts, and call the service instead."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .client import Client
from .errors import RemoteExpertsError

SHARED_NAMES = ("shared_expert", "shared_experts")
MOST_BYTES = 1 << 24
"""Of hidden states in one call."""


@dataclass(slots=True)
class Calls:
    """What all remote experts of one model share: the client, the adapter of the moment, the versions that answered."""

    client: Client
    adapter: str | None = None
    timeout_s: float | None = None
    versions: dict[str, int] = field(default_factory=dict)

    def forward(self, layer: int, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer's output, shared experts included. Raises ``ServiceError``.

        Tokens do not depend on each other, so a long prompt goes in several bodies, each far below the limit.
        """
        rows = max(1, MOST_BYTES // (2 * hidden_states.shape[-1]))
        parts = zip(*(torch.split(tensor, rows) for tensor in (hidden_states, ids, weights)), strict=True)
        outputs = [self._forward(layer, *part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _forward(self, layer: int, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        answer = self.client.answer(
            layer,
            hidden_states,
            topk_ids=ids,
            topk_weights=weights,
            adapter=self.adapter,
            timeout_s=self.timeout_s,
        )
        self.versions = dict(answer.adapter_versions)
        return answer.hidden_states


class RemoteLayer(nn.Module):
    """The experts of one MoE block, computed by the service; what chooses among them stays in the block."""

    def __init__(self, layer: int, calls: Calls) -> None:
        super().__init__()
        self.layer = layer
        self.calls = calls

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` from ``[T, H]`` and ids and weights ``[T, top_k]``, with the shared experts' part in it."""
        call: Any = _RemoteForward.apply
        output: Tensor = call(hidden_states, top_k_weights, top_k_index, self.calls, self.layer)
        return output

    def extra_repr(self) -> str:
        return f"layer={self.layer}, url={self.calls.client.url!r}"


class Counted(nn.Module):
    """Shared experts that the service has counted already: zero, to be added to what it answered."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Zeros of the shape of ``hidden_states``."""
        return torch.zeros_like(hidden_states)


class _RemoteForward(torch.autograd.Function):
    """A call of the service; gradients end here with an error rather than with silence."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, calls: Calls, layer: int) -> Tensor:
        ctx.layer = layer
        return calls.forward(layer, hidden, ids, weights)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise RemoteExpertsError(
            f"the experts of layer {ctx.layer} run in the service, which gives no gradients: "
            "a model with remote experts cannot be trained"
        )


def moe_blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """(layer number, MoE block) of every layer of ``model`` that has a router and experts."""
    for name, module in model.named_modules():
        parent, _, _ = name.rpartition(".")
        above, _, number = parent.rpartition(".")
        if above.rpartition(".")[2] == "layers" and number.isdecimal() and {"gate", "experts"} <= _children(module):
            yield int(number), module


def local_parts(block: nn.Module) -> dict[str, nn.Module]:
    """What of a MoE block the service computes: its experts and its shared experts, by name."""
    return {name: child for name, child in block.named_children() if name == "experts" or name in SHARED_NAMES}


def make_remote(block: nn.Module, layer: int, calls: Calls) -> None:
    """Put remote experts in the place of the local ones of ``block``."""
    for name in local_parts(block):
        setattr(block, name, RemoteLayer(layer, calls) if name == "experts" else Counted())


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
