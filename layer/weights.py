"""The tensors of one MoE layer, in the one canonical form that everything else packs or reads."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UnsupportedCheckpointError
from .spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one MoE layer on the host, bf16 unless said otherwise.

    ============================  ==========================  ==========================================
    ``gate_up``                   ``[E_local, 2I, H]``        gate rows ``0..I-1``, then up rows
    ``down``                      ``[E_local, H, I]``
    ``router``                    ``[E, H]``                  as stored (bf16 or fp32), all experts
    ``correction_bias``           ``[E]`` fp32, or None       DeepSeek's ``e_score_correction_bias``
    ``shared_gate_up``            ``[2*Is, H]``, or None      shared experts together, gate rows first
    ``shared_down``               ``[H, Is]``, or None
    ``shared_gate``               ``[1, H]``, or None         the sigmoid gate of Qwen's shared expert
    ============================  ==========================  ==========================================
    """

    gate_up: Tensor
    down: Tensor
    router: Tensor
    correction_bias: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None

    def check(self, spec: LayerSpec) -> None:
        """Raise ``UnsupportedCheckpointError`` unless every tensor has the shape ``spec`` demands."""
        for name, shape in shapes(spec).items():
            tensor: Tensor | None = getattr(self, name)
            found = None if tensor is None else tuple(tensor.shape)
            if found != shape:
                raise UnsupportedCheckpointError(f"layer {spec.index}: {name} should be {shape}, found {found}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (getattr(self, name) for name in self.__slots__)
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def shapes(spec: LayerSpec) -> Mapping[str, tuple[int, ...] | None]:
    """What shape each tensor of ``LayerWeights`` has in a layer of ``spec``; None for those that it has not got."""
    experts, hidden, width = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    shared = spec.shared_intermediate_size if spec.holds_shared_experts else 0
    return {
        "gate_up": (experts, 2 * width, hidden),
        "down": (experts, hidden, width),
        "router": (spec.num_experts, hidden),
        "correction_bias": (spec.num_experts,) if spec.routing.has_correction_bias else None,
        "shared_gate_up": (2 * shared, hidden) if shared else None,
        "shared_down": (hidden, shared) if shared else None,
        "shared_gate": (1, hidden) if shared and spec.shared_gated else None,
    }
