"""The oracle against transformers' modules and plain loops over tokens, and the tolerance rule against itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.engine import LayerBatch
from moelet.layer.oracle import layer_forward
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights
from oracle import assert_close_to_truth, assert_layer_close_to_truth, frobenius_error, torch_bf16_layer
from random_layers import (
    EXPERTS,
    HIDDEN,
    SHARED,
    SHARED_SPEC,
    SPEC,
    TOP_K,
    WIDTH,
    adapter_of,
    random_adapter,
    random_batch,
    random_lora,
    random_weights,
    slice_weights,
)


def assert_same(value: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(value, truth.to(value.dtype), rtol=1e-10, atol=1e-12)


def transformers_block(weights: LayerWeights) -> nn.Module:
    """Qwen2's MoE block, shared expert and its sigmoid gate included, in float64 with these weights."""
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=SHARED,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=False,
    )
    config._experts_implementation = "eager"
    assert weights.shared_gate_up is not None
    gate, up = weights.shared_gate_up.chunk(2)
    block = Qwen2MoeSparseMoeBlock(config).double()
    state = {
        "gate.weight": weights.router,
        "experts.gate_up_proj": weights.gate_up,
        "experts.down_proj": weights.down,
        "shared_expert.gate_proj.weight": gate,
        "shared_expert.up_proj.weight": up,
        "shared_expert.down_proj.weight": weights.shared_down,
        "shared_expert_gate.weight": weights.shared_gate,
    }
    block.load_state_dict(state)
    return block


@torch.no_grad()
def test_the_block_of_transformers_agrees() -> None:
    weights = random_weights(SHARED_SPEC)
    batch = random_batch(SHARED_SPEC, 19)
    own_gate = replace(batch, topk_ids=None, topk_weights=None)
    theirs = transformers_block(weights)(batch.hidden_states.double()[None])
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view(19, HIDDEN)
    ours = layer_forward(SHARED_SPEC, weights, own_gate)
    # Routing is fp32 there and here; everything after it is float64.
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_experts_of_transformers_agree_on_given_top_k() -> None:
    weights = random_weights(SPEC)
    batch = random_batch(SPEC, 19)
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    experts = transformers_block(random_weights(SHARED_SPEC)).experts
    experts.load_state_dict({"gate_up_proj": weights.gate_up, "down_proj": weights.down})
    theirs = experts(batch.hidden_states.double(), batch.topk_ids.long(), batch.topk_weights.double())
    assert_same(layer_forward(SPEC, weights, batch), theirs)


def test_logits_and_gate_route_alike() -> None:
    weights = random_weights(SPEC)
    own_gate = replace(random_batch(SPEC, 9), topk_ids=None, topk_weights=None)
    logits = own_gate.hidden_states.float() @ weights.router.float().T
    by_logits = replace(own_gate, router_logits=logits)
    torch.testing.assert_close(
        layer_forward(SPEC, weights, by_logits), layer_forward(SPEC, weights, own_gate), rtol=1e-5, atol=1e-6
    )


def merged(weight: Tensor, lora: LoraWeights | None, expert: int) -> Tensor:
    """``W + scaling * B A`` of one expert in float64, looked up without any batching."""
    if lora is None:
        return weight.double()
    a = lora.a[min(expert, len(lora.a) - 1)].double()
    b = lora.b[min(expert, len(lora.b) - 1)].double()
    return weight.double() + float(lora.scaling[expert]) * (b @ a)


def loop_over_tokens(spec: LayerSpec, weights: LayerWeights, batch: LayerBatch, adapters: list[Adapter]) -> Tensor:
    """The layer token by token, choice by choice, with every adapter merged into the weights."""

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor, layer: LayerAdapter, expert: int, prefix: str) -> Tensor:
        half = len(gate_up) // 2
        gate = merged(gate_up[:half], getattr(layer, prefix + "gate"), expert) @ x
        up = merged(gate_up[half:], getattr(layer, prefix + "up"), expert) @ x
        return merged(down, getattr(layer, prefix + "down"), expert) @ (gate / (1 + (-gate).exp()) * up)

    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    out = torch.zeros(batch.num_tokens, spec.hidden_size, dtype=torch.float64)
    for token, x in enumerate(batch.hidden_states.double()):
        slot = -1 if batch.token_slots is None else int(batch.token_slots[token])
        layer = LayerAdapter() if slot < 0 else adapters[slot].layers.get(spec.index, LayerAdapter())
        for choice, expert in enumerate(batch.topk_ids[token].tolist()):
            if expert >= 0:
                y = mlp(x, weights.gate_up[expert], weights.down[expert], layer, expert, "")
                out[token] += float(batch.topk_weights[token, choice]) * y
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            y = mlp(x, weights.shared_gate_up, weights.shared_down, layer, 0, "shared_")
            gate = 1.0 if weights.shared_gate is None else 1 / (1 + (-(weights.shared_gate.double() @ x)).exp())
            out[token] += gate * y
    return out


def uneven_adapter(spec: LayerSpec) -> Adapter:
    """Ranks and scaling that differ by expert, none at all for expert 1, and nothing on up."""
    g = torch.Generator().manual_seed(77)
    lora = random_lora(g, spec.num_experts, 5, spec.hidden_size, spec.intermediate_size)
    ranks = torch.tensor([5, 0, 1, 3, 5, 2], dtype=torch.int32)
    live = torch.arange(5) < ranks[:, None]
    gate = replace(lora, ranks=ranks, a=lora.a * live[:, :, None], b=lora.b * live[:, None, :])
    down = random_lora(g, spec.num_experts, 3, spec.intermediate_size, spec.hidden_size)
    return adapter_of(spec, LayerAdapter(gate=gate, down=down))


@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC, replace(SHARED_SPEC, shared_gated=False)])
def test_a_loop_over_tokens_with_merged_weights_agrees(spec: LayerSpec) -> None:
    weights = random_weights(spec)
    elsewhere = Adapter(path=random_adapter(spec).path, rank=1, lora_alpha=1.0, scaling=1.0, layers={})
    adapters = [
        random_adapter(spec, 1),
        random_adapter(spec, 2, rank=3, shared_outer=True),
        uneven_adapter(spec),
        elsewhere,
    ]
    batch = random_batch(spec, 23, slots=[0, 1, -1, 2, 3], drop=0.2)
    assert_same(layer_forward(spec, weights, batch, adapters), loop_over_tokens(spec, weights, batch, adapters))
    assert (
        frobenius_error(
            layer_forward(spec, weights, replace(batch, token_slots=None)),
            layer_forward(spec, weights, batch, adapters),
        )
        > 0.1
    )


def test_float32_is_near_float64() -> None:
    weights, batch = random_weights(SHARED_SPEC), random_batch(SHARED_SPEC, 11, slots=[0, -1])
    adapters = [random_adapter(SHARED_SPEC)]
    narrow = layer_forward(SHARED_SPEC, weights, batch, adapters, dtype=torch.float32)
    assert narrow.dtype == torch.float32
    assert frobenius_error(narrow, layer_forward(SHARED_SPEC, weights, batch, adapters)) < 1e-6


def test_expert_parallel_slices_sum_to_the_whole() -> None:
    weights, batch = random_weights(SHARED_SPEC), random_batch(SHARED_SPEC, 17, slots=[0, 1, -1], drop=0.1)
    adapters = [random_adapter(SHARED_SPEC, 1), random_adapter(SHARED_SPEC, 2, shared_outer=True)]
    parts = [SHARED_SPEC.expert_slice(0, 2), SHARED_SPEC.expert_slice(2, 3), SHARED_SPEC.expert_slice(5, 1)]
    total = sum(layer_forward(part, slice_weights(part, weights), batch, adapters) for part in parts)
    assert isinstance(total, Tensor)
    assert_same(total, layer_forward(SHARED_SPEC, weights, batch, adapters))


def test_rounding_is_that_of_bf16_and_on_every_intermediate() -> None:
    weights, batch = random_weights(SHARED_SPEC), random_batch(SHARED_SPEC, 64, slots=[0, -1])
    adapters = [random_adapter(SHARED_SPEC)]
    truth = layer_forward(SHARED_SPEC, weights, batch, adapters)
    rounded = layer_forward(SHARED_SPEC, weights, batch, adapters, rounding="bf16")
    assert torch.equal(rounded, rounded.bfloat16().double())
    measure = frobenius_error(torch_bf16_layer(SHARED_SPEC, weights, batch, adapters), truth)
    # More than the output's rounding alone, no more than where every single operation rounds.
    assert frobenius_error(truth.bfloat16(), truth) * 1.2 < frobenius_error(rounded, truth) < measure


def test_nan_stays_with_its_token_and_minus_one_contributes_nothing() -> None:
    weights, batch = random_weights(SPEC), random_batch(SPEC, 8)
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    clean = layer_forward(SPEC, weights, batch)
    hidden, ids, scale = batch.hidden_states.clone(), batch.topk_ids.clone(), batch.topk_weights.clone()
    hidden[3, 5] = torch.nan
    ids[6], scale[6] = -1, torch.nan
    out = layer_forward(SPEC, weights, replace(batch, hidden_states=hidden, topk_ids=ids, topk_weights=scale))
    assert out[3].isnan().all()
    assert out[6].count_nonzero() == 0
    others = [0, 1, 2, 4, 5, 7]
    assert_same(out[others], clean[others])


def test_the_rule_takes_the_straightforward_layer_itself_and_refuses_a_worse_one() -> None:
    weights, batch = random_weights(SPEC), random_batch(SPEC, 32, slots=[0, -1])
    adapters = [random_adapter(SPEC)]
    truth = layer_forward(SPEC, weights, batch, adapters)
    baseline = torch_bf16_layer(SPEC, weights, batch, adapters)
    assert_layer_close_to_truth(baseline, SPEC, weights, batch, adapters)
    with pytest.raises(AssertionError, match="Frobenius"):
        assert_close_to_truth(truth + 1.2 * (baseline.double() - truth), truth, baseline)
    one_off = truth.clone()
    one_off[4, 7] += 2.5 * (baseline.double() - truth).abs().max()
    with pytest.raises(AssertionError, match="largest error"):
        assert_close_to_truth(one_off, truth, baseline)
    with pytest.raises(AssertionError, match="finite"):
        assert_close_to_truth(baseline.index_fill(0, torch.tensor([1]), torch.nan), truth, baseline)
    with pytest.raises(AssertionError, match="Frobenius"):
        assert_layer_close_to_truth(torch_bf16_layer(SPEC, weights, batch), SPEC, weights, batch, adapters)
