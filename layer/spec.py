"""Every size of a MoE layer, checked once; tensors are measured against it, never it against them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from .errors import LayerNotServedError, UnsupportedCheckpointError


class RoutingMethod(StrEnum):
    """How router logits become ``top_k`` experts and weights; formulas in ``routing.py``."""

    SOFTMAX_TOPK = "softmax_topk"
    """softmax over all experts, then top-k (Qwen, Mixtral, OLMoE); ``renormalize`` divides by the sum."""
    TOPK_SOFTMAX = "topk_softmax"
    """top-k of the raw logits, then softmax over the chosen."""
    SIGMOID_GROUPED = "sigmoid_grouped"
    """sigmoid; chosen by score + bias within the best groups; weights without the bias (DeepSeek-V3, GLM, Kimi)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """The routing method of one layer and its parameters.

    ``num_groups``, ``topk_groups`` and ``has_correction_bias`` only matter to ``SIGMOID_GROUPED``.
    ``routed_scaling_factor`` multiplies the weights that routing itself computes, exactly once;
    weights sent with a request are used as sent.
    """

    method: RoutingMethod = RoutingMethod.SOFTMAX_TOPK
    renormalize: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    has_correction_bias: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Sizes and routing of one MoE layer.

    ``index`` is the layer's number in the checkpoint. ``num_local_experts`` experts starting at
    ``local_expert_offset`` are held here (an expert-parallel slice; by default all of them).
    ``shared_intermediate_size`` is the width of the shared experts taken together (0: none);
    ``shared_gated`` says whether ``sigmoid(x @ shared_gate.T)`` scales their output.
    """

    index: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    shared_intermediate_size: int = 0
    shared_gated: bool = False
    num_local_experts: int = -1
    local_expert_offset: int = 0

    def __post_init__(self) -> None:
        if self.num_local_experts == -1:
            object.__setattr__(self, "num_local_experts", self.num_experts)
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_local_experts"):
            if getattr(self, name) < 1:
                raise UnsupportedCheckpointError(
                    f"layer {self.index}: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.top_k > self.num_experts:
            raise UnsupportedCheckpointError(
                f"layer {self.index}: top_k is {self.top_k} but there are only {self.num_experts} experts"
            )
        if self.local_expert_offset < 0 or self.local_expert_end > self.num_experts:
            raise UnsupportedCheckpointError(
                f"layer {self.index}: local experts {self.local_expert_offset}..{self.local_expert_end} "
                f"lie outside 0..{self.num_experts}"
            )
        if self.routing.method is RoutingMethod.SIGMOID_GROUPED:
            self._check_groups()

    def _check_groups(self) -> None:
        groups, kept = self.routing.num_groups, self.routing.topk_groups
        if groups < 1 or self.num_experts % groups or not 1 <= kept <= groups:
            raise UnsupportedCheckpointError(
                f"layer {self.index}: the best {kept} of {groups} groups of {self.num_experts} experts cannot be chosen"
            )
        size = self.num_experts // groups
        if groups > 1 and (size < 2 or kept * size < self.top_k):
            raise UnsupportedCheckpointError(
                f"layer {self.index}: {kept} groups of {size} experts are too few to score by their best two "
                f"and to choose {self.top_k} experts from"
            )

    @property
    def local_expert_end(self) -> int:
        """One past the last expert held here."""
        return self.local_expert_offset + self.num_local_experts

    @property
    def holds_shared_experts(self) -> bool:
        """Whether this slice computes the shared experts: the slice with expert 0 does, so that an
        expert-parallel group counts them exactly once in its sum."""
        return self.shared_intermediate_size > 0 and self.local_expert_offset == 0

    @property
    def num_shared_chunks(self) -> int:
        """Shared experts seen as experts of the routed width: ``ceil(shared_intermediate_size / I)``.

        A gated MLP of width ``n*I`` is the sum of ``n`` gated MLPs of width ``I``, so shared experts
        can ride as ``n`` more experts that every token meets.
        """
        if not self.holds_shared_experts:
            return 0
        return -(-self.shared_intermediate_size // self.intermediate_size)

    def expert_slice(self, offset: int, count: int) -> "LayerSpec":
        """The same layer, holding only experts ``offset .. offset + count``."""
        return replace(self, local_expert_offset=offset, num_local_experts=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is served of one checkpoint: its name, family, folder and MoE layers.

    ``skipped`` maps every layer that is not served to the reason (dense, or left out by choice).
    """

    name: str
    model_type: str
    path: Path
    num_hidden_layers: int
    layers: Mapping[int, LayerSpec]
    skipped: Mapping[int, str] = field(default_factory=dict)

    def layer(self, index: int) -> LayerSpec:
        """The spec of layer ``index``. Raises ``LayerNotServedError`` naming what is served."""
        try:
            return self.layers[index]
        except KeyError:
            why = self.skipped.get(index, "there is no such layer")
            served = ranges(self.layers)
            raise LayerNotServedError(
                f"layer {index} is not served: {why}; the layers served are {served}", param="layer"
            ) from None


def ranges(indices: Mapping[int, object] | list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[str] = []
    ordered = sorted(indices)
    start = 0
    for i in range(len(ordered)):
        if i + 1 == len(ordered) or ordered[i + 1] != ordered[i] + 1:
            first, last = ordered[start], ordered[i]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i + 1
    return ",".join(parts)
