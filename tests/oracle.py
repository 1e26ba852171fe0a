"""The tolerance rule: how far from float64 a layer's output may be, and the plain torch layer that sets the measure."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moelet.layer.adapter import Adapter, LoraWeights
from moelet.layer.engine import LayerBatch
from moelet.layer.oracle import layer_forward
from moelet.layer.routing import gate_logits, route
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights

FROBENIUS_FACTOR = 1.1
LARGEST_FACTOR = 2.0
LARGEST_SLACK = 1e-6


def frobenius_error(value: Tensor, truth: Tensor) -> float:
    """``|value - truth| / |truth|`` over all elements, in float64 (absolute where the truth is zero)."""
    norm = float(truth.double().norm())
    return float((value.double() - truth.double()).norm()) / (norm or 1.0)


def largest_error(value: Tensor, truth: Tensor) -> float:
    """``max |value - truth|`` in float64, 0 of an empty tensor."""
    return max((value.double() - truth.double()).abs().flatten().tolist(), default=0.0)


def assert_close_to_truth(value: Tensor, truth: Tensor, baseline: Tensor) -> None:
    """Both rules, over the elements where the truth is finite; the others must be NaN or infinite alike.

    ``value`` is on trial, ``truth`` is float64, ``baseline`` is the straightforward torch bf16
    result on the same input. Relative Frobenius error at most 1.1 times the baseline's; largest
    absolute error at most twice the baseline's plus 1e-6. Raises ``AssertionError`` with the figures.
    """
    assert value.shape == truth.shape == baseline.shape, (value.shape, truth.shape, baseline.shape)
    finite = truth.isfinite()
    wrong = value.isfinite() != finite
    assert not wrong.any(), f"{int(wrong.sum())} elements are finite where the truth is not, or the reverse"
    value, truth, baseline = value[finite], truth[finite], baseline[finite]

    error, measure = frobenius_error(value, truth), frobenius_error(baseline, truth)
    assert error <= FROBENIUS_FACTOR * measure, (
        f"relative Frobenius error {error:.3e} is over {FROBENIUS_FACTOR} x {measure:.3e} of torch in bf16"
    )
    error, measure = largest_error(value, truth), largest_error(baseline, truth)
    assert error <= LARGEST_FACTOR * measure + LARGEST_SLACK, (
        f"largest error {error:.3e} is over {LARGEST_FACTOR} x {measure:.3e} + {LARGEST_SLACK} of torch in bf16"
    )


def assert_layer_close_to_truth(
    value: Tensor,
    spec: LayerSpec,
    weights: LayerWeights,
    batch: LayerBatch,
    adapters: Sequence[Adapter | None] = (),
) -> None:
    """``assert_close_to_truth`` of a layer's output ``[T, H]``, truth and baseline worked out here."""
    truth = layer_forward(spec, weights, batch, adapters)
    assert_close_to_truth(value, truth, torch_bf16_layer(spec, weights, batch, adapters))


def torch_bf16_layer(
    spec: LayerSpec, weights: LayerWeights, batch: LayerBatch, adapters: Sequence[Adapter | None] = ()
) -> Tensor:
    """The layer as one writes it with torch in bf16, expert by expert; bf16 ``[T, H]``.

    Shares no code with ``layer.oracle``: ``F.linear`` on bf16 tensors, so every operation rounds;
    only the sum over choices is fp32.
    """
    x, slots = batch.hidden_states, batch.token_slots
    ids, topk_weights = batch.topk_ids, batch.topk_weights
    if ids is None or topk_weights is None:
        logits = gate_logits(x, weights.router) if batch.router_logits is None else batch.router_logits
        ids, topk_weights = route(logits, spec, weights.correction_bias)

    out = torch.zeros(x.shape, dtype=torch.float32)
    for local in range(spec.num_local_experts):
        expert = spec.local_expert_offset + local
        tokens, choices = torch.where(ids == expert)
        gate, up = weights.gate_up[local].chunk(2)
        loras = _row_loras(spec, adapters, slots, tokens, expert, "")
        y = _bf16_mlp(x[tokens], gate, up, weights.down[local], loras)
        out.index_add_(0, tokens, y.float() * topk_weights[tokens, choices, None])
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        gate, up = weights.shared_gate_up.chunk(2)
        loras = _row_loras(spec, adapters, slots, torch.arange(len(x)), 0, "shared_")
        y = _bf16_mlp(x, gate, up, weights.shared_down, loras)
        if weights.shared_gate is not None:
            y = torch.sigmoid(F.linear(x, weights.shared_gate)) * y
        out += y
    return out.bfloat16()


RowLoras = list[tuple[Tensor, dict[str, tuple[Tensor, Tensor, float]]]]


def _row_loras(
    spec: LayerSpec,
    adapters: Sequence[Adapter | None],
    slots: Tensor | None,
    tokens: Tensor,
    expert: int,
    prefix: str,
) -> RowLoras:
    """Per adapter: which rows are its, and (A, B, scaling) of each projection for this expert."""
    found: RowLoras = []
    for slot, adapter in enumerate(adapters):
        if slots is None or adapter is None or spec.index not in adapter.layers:
            continue
        layer = adapter.layers[spec.index]
        loras: dict[str, tuple[Tensor, Tensor, float]] = {}
        for name in ("gate", "up", "down"):
            lora: LoraWeights | None = getattr(layer, prefix + name)
            if lora is not None:
                a, b = lora.a.expand(len(lora.ranks), -1, -1), lora.b.expand(len(lora.ranks), -1, -1)
                loras[name] = a[expert], b[expert], float(lora.scaling[expert])
        found.append((slots[tokens] == slot, loras))
    return found


def _bf16_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, loras: RowLoras) -> Tensor:
    def project(name: str, x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        for rows, by_name in loras:
            if name in by_name:
                a, b, scaling = by_name[name]
                y[rows] += F.linear(F.linear(x[rows], a), b) * scaling
        return y

    return project("down", F.silu(project("gate", x, gate)) * project("up", x, up), down)
