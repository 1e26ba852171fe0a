"""The CPU engine: within the tolerance rule of float64, and bit for bit independent of a token's neighbours."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moelet.layer import reference
from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.engine import Engine, LayerBatch
from moelet.layer.errors import AdapterRefusedError, EngineError, LayerNotServedError, RequestError
from moelet.layer.oracle import layer_forward
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import LayerSpec, RoutingMethod, RoutingSpec
from moelet.layer.weights import LayerWeights
from oracle import assert_close_to_truth, assert_layer_close_to_truth, torch_bf16_layer
from random_layers import (
    GROUPED_SPEC,
    SHARED_SPEC,
    SPEC,
    adapter_of,
    model_of,
    random_adapter,
    random_batch,
    random_lora,
    random_weights,
    slice_weights,
)

FAMILIES = ["plain", "shared", "grouped"]
SOFTMAX = RoutingSpec(method=RoutingMethod.SOFTMAX_TOPK, renormalize=True)


def engine_of(
    spec: LayerSpec, weights: LayerWeights | None = None, adapters: Sequence[Adapter | None] = ()
) -> ReferenceEngine:
    engine = ReferenceEngine(model_of(spec), {spec.index: weights or random_weights(spec)})
    for slot, adapter in enumerate(adapters):
        if adapter is not None:
            engine.install_adapter(slot, adapter)
    return engine


def four_adapters(spec: LayerSpec) -> list[Adapter | None]:
    """Per-expert, an empty slot, shared-outer of an odd rank, only down, and one of another layer."""
    g = torch.Generator().manual_seed(5)
    only_down = random_lora(g, spec.num_experts, 24, spec.intermediate_size, spec.hidden_size)
    elsewhere = replace(random_adapter(spec), layers={0: LayerAdapter(down=only_down)})
    return [
        random_adapter(spec, 1),
        None,
        random_adapter(spec, 2, rank=3, shared_outer=True),
        adapter_of(spec, LayerAdapter(down=only_down)),
        elsewhere,
    ]


def only(batch: LayerBatch, tokens: Sequence[int]) -> LayerBatch:
    """The batch of these tokens alone, in this order."""

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[list(tokens)]

    return LayerBatch(
        layer=batch.layer,
        hidden_states=batch.hidden_states[list(tokens)],
        topk_ids=pick(batch.topk_ids),
        topk_weights=pick(batch.topk_weights),
        router_logits=pick(batch.router_logits),
        token_slots=pick(batch.token_slots),
    )


def routed(batch: LayerBatch, how: str, spec: LayerSpec) -> LayerBatch:
    """The batch with top-k as given, or routed from logits or by the layer's gate."""
    if how == "topk":
        return batch
    logits = torch.randn(batch.num_tokens, spec.num_experts, generator=torch.Generator().manual_seed(3))
    return replace(batch, topk_ids=None, topk_weights=None, router_logits=logits if how == "logits" else None)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def assert_same_bits(value: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits(value), bits(expected))


@pytest.mark.parametrize("how", ["topk", "logits", "gate"])
@pytest.mark.parametrize("slots", [None, [0], [2, -1, 0, 3, 4]], ids=["base", "one", "mixed"])
@pytest.mark.parametrize("spec", [SPEC, replace(SHARED_SPEC, routing=SOFTMAX), GROUPED_SPEC], ids=FAMILIES)
def test_output_is_within_the_rule(spec: LayerSpec, slots: list[int] | None, how: str) -> None:
    weights, adapters = random_weights(spec), four_adapters(spec)
    batch = routed(random_batch(spec, 45, slots=slots, drop=0.1), how, spec)
    out = engine_of(spec, weights, adapters).forward(batch)
    assert out.dtype == torch.bfloat16
    assert_layer_close_to_truth(out, spec, weights, batch, adapters)


@pytest.mark.parametrize("width", [2048, 300])
def test_output_of_wide_layers_is_within_the_rule(width: int) -> None:
    spec = LayerSpec(index=1, hidden_size=width, intermediate_size=520, num_experts=4, top_k=2)
    weights, adapters = random_weights(spec), [random_adapter(spec, rank=16)]
    batch = random_batch(spec, 21, slots=[0, -1])
    assert_layer_close_to_truth(engine_of(spec, weights, adapters).forward(batch), spec, weights, batch, adapters)


@pytest.mark.parametrize("how", ["topk", "logits", "gate"])
@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC, GROUPED_SPEC], ids=FAMILIES)
def test_a_token_has_the_same_bits_in_any_batch_and_place(spec: LayerSpec, how: str) -> None:
    engine = engine_of(spec, adapters=four_adapters(spec))
    batch = routed(random_batch(spec, 64, slots=[0, -1, 2, 3, 4], drop=0.1), how, spec)
    whole = engine.forward(batch)
    assert_same_bits(engine.forward(batch), whole)
    for token in (0, 1, 31, 62, 63):
        assert_same_bits(engine.forward(only(batch, [token]))[0], whole[token])
    for tokens in ([5, 40], [63, 2, 9, 33, 20, 1, 50], list(range(63, -1, -1)), [7] * 64):
        assert_same_bits(engine.forward(only(batch, tokens)), whole[tokens])


def test_a_wide_layer_is_batch_invariant() -> None:
    spec = LayerSpec(index=1, hidden_size=2048, intermediate_size=520, num_experts=3, top_k=2)
    engine = engine_of(spec, adapters=[random_adapter(spec, rank=16)])
    batch = random_batch(spec, 64, slots=[0, -1])
    whole = engine.forward(batch)
    for tokens in ([33], [12, 33], [1, 2, 3, 4, 5, 6, 33]):
        assert_same_bits(engine.forward(only(batch, tokens)), whole[tokens])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("how", ["topk", "logits", "gate"])
def test_nan_and_infinity_stay_with_their_token(poison: float, how: str) -> None:
    engine = engine_of(SHARED_SPEC, adapters=four_adapters(SHARED_SPEC))
    batch = routed(random_batch(SHARED_SPEC, 20, slots=[0, -1, 2]), how, SHARED_SPEC)
    clean = engine.forward(batch)
    hidden = batch.hidden_states.clone()
    hidden[4, 3] = hidden[11] = poison
    dirty = engine.forward(replace(batch, hidden_states=hidden))
    others = [t for t in range(20) if t not in (4, 11)]
    assert_same_bits(dirty[others], clean[others])
    assert not dirty[[4, 11]].isfinite().any()
    if poison != poison:
        assert dirty[[4, 11]].isnan().all()


def test_tokens_without_adapter_have_the_bits_of_a_base_run() -> None:
    adapters = four_adapters(SHARED_SPEC)
    batch = random_batch(SHARED_SPEC, 30, slots=[0, -1, 2, 4])
    base = engine_of(SHARED_SPEC).forward(replace(batch, token_slots=None))
    mixed = engine_of(SHARED_SPEC, adapters=adapters).forward(batch)
    assert batch.token_slots is not None
    bare = (batch.token_slots == -1) | (batch.token_slots == 4)
    assert_same_bits(mixed[bare], base[bare])
    assert not (mixed[~bare] == base[~bare]).all(dim=1).any()


def test_an_adapter_with_zero_b_has_the_bits_of_the_base() -> None:
    adapter = random_adapter(SHARED_SPEC, 1)
    layer = adapter.layers[SHARED_SPEC.index]
    silent = LayerAdapter(**{name: replace(lora, b=torch.zeros_like(lora.b)) for name, lora in layer.items()})
    batch = random_batch(SHARED_SPEC, 30, slots=[0])
    base = engine_of(SHARED_SPEC).forward(replace(batch, token_slots=None))
    out = engine_of(SHARED_SPEC, adapters=[adapter_of(SHARED_SPEC, silent)]).forward(batch)
    assert_same_bits(out, base)


def padded(lora: LoraWeights, rank: int) -> LoraWeights:
    """The same LoRA in tensors of a larger rank."""
    more = rank - lora.rank
    pad = torch.nn.functional.pad
    return replace(lora, a=pad(lora.a, (0, 0, 0, more)), b=pad(lora.b, (0, more)))


def test_ranks_differ_by_expert_and_padding_changes_no_bit() -> None:
    g = torch.Generator().manual_seed(9)
    lora = random_lora(g, SPEC.num_experts, 7, SPEC.hidden_size, SPEC.intermediate_size)
    ranks = torch.tensor([7, 0, 3, 1, 7, 5], dtype=torch.int32)
    live = torch.arange(7) < ranks[:, None]
    lora = replace(lora, ranks=ranks, a=lora.a * live[:, :, None], b=lora.b * live[:, None, :])
    weights, batch = random_weights(SPEC), random_batch(SPEC, 40, slots=[0])
    adapter = adapter_of(SPEC, LayerAdapter(up=lora))
    out = engine_of(SPEC, weights, [adapter]).forward(batch)
    assert_layer_close_to_truth(out, SPEC, weights, batch, [adapter])
    wider = adapter_of(SPEC, LayerAdapter(up=padded(lora, 32)))
    assert_same_bits(engine_of(SPEC, weights, [wider]).forward(batch), out)


@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC], ids=["plain", "shared"])
def test_tokens_without_experts_get_the_shared_experts_alone(spec: LayerSpec) -> None:
    weights, batch = random_weights(spec), random_batch(spec, 5, drop=1.0)
    assert batch.topk_weights is not None
    batch = replace(batch, topk_weights=torch.full_like(batch.topk_weights, torch.nan))
    out = engine_of(spec, weights).forward(batch)
    assert bool(out.count_nonzero()) == (spec is SHARED_SPEC)
    assert_layer_close_to_truth(out, spec, weights, batch)


def test_no_tokens_give_no_rows() -> None:
    for how in ("topk", "logits", "gate"):
        batch = routed(random_batch(SHARED_SPEC, 0, slots=[0]), how, SHARED_SPEC)
        assert engine_of(SHARED_SPEC, adapters=four_adapters(SHARED_SPEC)).forward(batch).shape == (0, 72)


def test_expert_parallel_slices_count_every_part_once() -> None:
    weights, adapters = random_weights(SHARED_SPEC), four_adapters(SHARED_SPEC)
    batch = random_batch(SHARED_SPEC, 40, slots=[0, 2, -1, 3], drop=0.1)
    truth = layer_forward(SHARED_SPEC, weights, batch, adapters)
    total, baseline = torch.zeros_like(truth), torch.zeros_like(truth)
    for part in (SHARED_SPEC.expert_slice(0, 2), SHARED_SPEC.expert_slice(2, 3), SHARED_SPEC.expert_slice(5, 1)):
        held = slice_weights(part, weights)
        total += engine_of(part, held, adapters).forward(batch)
        baseline += torch_bf16_layer(part, held, batch, adapters)
    assert_close_to_truth(total, truth, baseline)


def test_a_long_batch_is_computed_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(SHARED_SPEC, adapters=four_adapters(SHARED_SPEC))
    batch = random_batch(SHARED_SPEC, 50, slots=[0, -1, 2])
    whole = engine.forward(batch)
    monkeypatch.setattr(reference, "MAX_SLOT_ROWS", 23)
    assert_same_bits(engine.forward(batch), whole)


def test_slots_change_whole_and_only_when_told() -> None:
    first, second = random_adapter(SPEC, 1), random_adapter(SPEC, 2, rank=5)
    engine = engine_of(SPEC, adapters=[first])
    batch = random_batch(SPEC, 12, slots=[0])
    before = engine.forward(batch)
    engine.install_adapter(0, second)
    assert_same_bits(engine.forward(batch), engine_of(SPEC, adapters=[second]).forward(batch))
    engine.install_adapter(0, first)
    assert_same_bits(engine.forward(batch), before)
    engine.remove_adapter(0)
    engine.remove_adapter(0)
    with pytest.raises(RequestError, match="slot 0 is empty"):
        engine.forward(batch)


def test_what_cannot_be_is_refused_by_name() -> None:
    engine: Engine = ReferenceEngine(model_of(SPEC), {}, max_loras=2, max_lora_rank=8)
    with pytest.raises(AdapterRefusedError, match="at most 8, found 9"):
        engine.install_adapter(0, random_adapter(SPEC, rank=8))
    with pytest.raises(EngineError, match="not loaded"):
        engine.forward(random_batch(SPEC, 1))
    with pytest.raises(LayerNotServedError, match="layer 0 is not served: dense"):
        engine.forward(replace(random_batch(SPEC, 1), layer=0))
    with pytest.raises(RequestError, match=r"token_slots must lie in -1\.\.1"):
        engine.forward(random_batch(SPEC, 3, slots=[0, 2]))
    with pytest.raises(LayerNotServedError):
        engine.plans(5)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_is_not_there_is_an_error_of_the_engine_s(slot: int) -> None:
    engine: Engine = ReferenceEngine(model_of(SPEC), {SPEC.index: random_weights(SPEC)}, max_loras=2, max_lora_rank=8)
    engine.install_adapter(1, random_adapter(SPEC, rank=4))
    batch = random_batch(SPEC, 3, slots=[1])
    before = engine.forward(batch)
    for adapter in (random_adapter(SPEC, rank=4), random_adapter(SPEC, rank=8)):  # the slot is looked at first
        with pytest.raises(EngineError, match=f"^there is no adapter slot {slot}: the slots are 0 to 1$"):
            engine.install_adapter(slot, adapter)
    with pytest.raises(EngineError, match=f"^there is no adapter slot {slot}: the slots are 0 to 1$"):
        engine.remove_adapter(slot)
    assert_same_bits(engine.forward(batch), before)


def test_weights_may_come_after_the_engine() -> None:
    weights: dict[int, LayerWeights] = {}
    engine = ReferenceEngine(model_of(SPEC), weights)
    weights[SPEC.index] = random_weights(SPEC)
    batch = random_batch(SPEC, 3)
    assert_same_bits(engine.forward(batch), engine_of(SPEC).forward(batch))
    assert [row["plan"] for row in engine.plans(SPEC.index)] == ["reference"]
    engine.close()
    with pytest.raises(EngineError):
        engine.forward(batch)
