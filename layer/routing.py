"""Routing: from router logits to ``top_k`` experts and weights, bit for bit the same in any batch."""

import torch
from torch import Tensor

from .engine import LayerBatch
from .spec import LayerSpec, RoutingMethod, RoutingSpec
from .tiles import elementwise, linear
from .weights import LayerWeights


def gate_logits(hidden: Tensor, router: Tensor) -> Tensor:
    """Router logits ``hidden @ router.T``, fp32 ``[T, E]`` from bf16 ``[T, H]`` and ``[E, H]``.

    Products and sums are fp32 (float64 if ``hidden`` is) and never rounded to bf16; a token's
    logits are the same bits in any batch.
    """
    return linear(hidden.to(_working_dtype(hidden)), router).contiguous()


def route(logits: Tensor, spec: LayerSpec, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts: ids int32 ``[T, top_k]``, best first, and weights fp32 ``[T, top_k]``.

    ``logits`` ``[T, E]``; the maths is fp32, or float64 throughout for float64 logits.
    ``correction_bias`` ``[E]`` is there exactly if ``spec.routing.has_correction_bias``. Formulas as
    in the routers of ``transformers`` (``Qwen3MoeTopKRouter``, ``DeepseekV3TopkRouter``).

    Where scores tie the lowest expert index wins. A token with a NaN logit (or +inf under a
    softmax) gets NaN weights and ids in range; no other token notices.
    Raises ``ValueError`` if the shapes or the presence of the bias disagree with ``spec``.
    """
    if logits.ndim != 2 or logits.shape[1] != spec.num_experts:
        raise ValueError(f"logits should be [T, {spec.num_experts}], got {list(logits.shape)}")
    if (correction_bias is not None) != spec.routing.has_correction_bias:
        raise ValueError(f"has_correction_bias is {spec.routing.has_correction_bias}, the bias given says otherwise")
    logits = logits.to(_working_dtype(logits))
    match spec.routing.method:
        case RoutingMethod.SOFTMAX_TOPK:
            ids = _best(logits, spec.top_k)
            weights = _renormalized(logits.softmax(dim=-1).gather(1, ids), spec.routing)
        case RoutingMethod.TOPK_SOFTMAX:
            ids = _best(logits, spec.top_k)
            weights = logits.gather(1, ids).softmax(dim=-1)
        case RoutingMethod.SIGMOID_GROUPED:
            scores = elementwise(torch.sigmoid, logits)
            ids = _best(_choice_scores(scores, spec.routing, correction_bias), spec.top_k)
            weights = _renormalized(scores.gather(1, ids), spec.routing, epsilon=1e-20)
    weights = weights * spec.routing.routed_scaling_factor
    poisoned = logits.isnan().any(dim=-1, keepdim=True)
    return ids.to(torch.int32), weights.masked_fill(poisoned, torch.nan)


def route_batch(spec: LayerSpec, weights: LayerWeights, batch: LayerBatch) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights fp32, both ``[T, top_k]``, as ``batch`` has them, or by its logits, or by the gate.

    ``batch`` has been checked against ``spec``.
    """
    if batch.topk_ids is not None and batch.topk_weights is not None:
        return batch.topk_ids, batch.topk_weights
    logits = batch.router_logits
    if logits is None:
        logits = gate_logits(batch.hidden_states, weights.router)
    return route(logits, spec, weights.correction_bias)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _best(scores: Tensor, count: int) -> Tensor:
    # torch.topk leaves the order of equal scores open; a stable sort does not.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _renormalized(weights: Tensor, routing: RoutingSpec, epsilon: float = 0.0) -> Tensor:
    """Weights over their sum, added up in slot order 0..k-1, if ``routing`` renormalises."""
    if not routing.renormalize:
        return weights
    total = weights[:, 0]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot]
    return weights / (total + epsilon)[:, None]


def _choice_scores(scores: Tensor, routing: RoutingSpec, correction_bias: Tensor | None) -> Tensor:
    """Scores to choose by: with the bias, and -inf outside the best ``topk_groups`` groups, a
    group being worth the sum of its best two (DeepSeek-V3)."""
    if correction_bias is not None:
        scores = scores + correction_bias.to(scores.dtype)
    if routing.num_groups == 1:
        return scores
    grouped = scores.reshape(len(scores), routing.num_groups, scores.shape[1] // routing.num_groups)
    best_two = grouped.topk(2, dim=-1).values
    kept = _best(best_two[..., 0] + best_two[..., 1], routing.topk_groups)
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, kept, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
