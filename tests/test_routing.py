"""Routing against a plain Python loop, against transformers' routers, and bit for bit across batches."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from checkpoints import FAMILY_CONFIGS, build_model, moe_block, router_of
from moelet.layer.errors import UnsupportedCheckpointError
from moelet.layer.families import FAMILIES, layer_specs
from moelet.layer.routing import gate_logits, route
from moelet.layer.spec import LayerSpec, RoutingMethod, RoutingSpec

SOFTMAX = RoutingSpec()
RENORMALIZED = RoutingSpec(renormalize=True)
TOPK_SOFTMAX = RoutingSpec(method=RoutingMethod.TOPK_SOFTMAX)
GROUPED = RoutingSpec(
    method=RoutingMethod.SIGMOID_GROUPED,
    renormalize=True,
    num_groups=4,
    topk_groups=2,
    has_correction_bias=True,
    routed_scaling_factor=2.5,
)
UNGROUPED = RoutingSpec(method=RoutingMethod.SIGMOID_GROUPED, has_correction_bias=True, routed_scaling_factor=1.5)
ALL_METHODS = [SOFTMAX, RENORMALIZED, TOPK_SOFTMAX, GROUPED, UNGROUPED]


def make_spec(routing: RoutingSpec, num_experts: int = 16, top_k: int = 3) -> LayerSpec:
    return LayerSpec(
        index=0, hidden_size=40, intermediate_size=24, num_experts=num_experts, top_k=top_k, routing=routing
    )


def make_bias(spec: LayerSpec, seed: int = 5) -> Tensor | None:
    if not spec.routing.has_correction_bias:
        return None
    return torch.randn(spec.num_experts, generator=torch.Generator().manual_seed(seed)) * 0.1


def plain_best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def plain_softmax(values: list[float]) -> list[float]:
    exps = [math.exp(v - max(values)) for v in values]
    return [e / math.fsum(exps) for e in exps]


def best_two(choice: list[float], routing: RoutingSpec) -> list[list[float]]:
    size = len(choice) // routing.num_groups
    return [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(routing.num_groups)]


def plain_groups_kept(choice: list[float], routing: RoutingSpec) -> list[int]:
    return plain_best([sum(pair) for pair in best_two(choice, routing)], routing.topk_groups)


def nearly_ties(row: list[float], routing: RoutingSpec, bias: list[float]) -> bool:
    """Whether two groups are worth the same but for the rounding of their sums, which differs from one order to
    another."""
    pairs = best_two([1 / (1 + math.exp(-x)) + b for x, b in zip(row, bias, strict=True)], routing)
    return any(a != b and abs(sum(a) - sum(b)) < 1e-6 for a, b in combinations(pairs, 2))


def plain_route(row: list[float], spec: LayerSpec, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One token, as the papers write it."""
    routing = spec.routing
    if routing.method is RoutingMethod.TOPK_SOFTMAX:
        ids = plain_best(row, spec.top_k)
        weights = plain_softmax([row[i] for i in ids])
    elif routing.method is RoutingMethod.SOFTMAX_TOPK:
        ids = plain_best(row, spec.top_k)
        weights = [plain_softmax(row)[i] for i in ids]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in row]
        choice = [s + b for s, b in zip(scores, bias or [0.0] * len(row), strict=True)]
        if routing.num_groups > 1:
            kept = plain_groups_kept(choice, routing)
            size = len(row) // routing.num_groups
            choice = [c if e // size in kept else -math.inf for e, c in enumerate(choice)]
        ids = plain_best(choice, spec.top_k)
        weights = [scores[i] for i in ids]
    if routing.renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return ids, [w * routing.routed_scaling_factor for w in weights]


@st.composite
def cases(draw: st.DrawFn) -> tuple[LayerSpec, list[list[float]], list[float] | None]:
    routing = draw(st.sampled_from(ALL_METHODS))
    num_experts = draw(st.sampled_from([8, 12, 20]))
    spec = make_spec(routing, num_experts, draw(st.integers(1, 4)))
    # Halves make ties common; one sign only, since sigmoid(x) + sigmoid(-x) is a near-tie of sums.
    number = st.integers(-8, 0).map(lambda n: n / 2)
    rows = draw(st.lists(st.lists(number, min_size=num_experts, max_size=num_experts), min_size=1, max_size=5))
    biases = st.lists(st.sampled_from([0.0, 0.25, -1.5]), min_size=num_experts, max_size=num_experts)
    return spec, rows, draw(biases) if routing.has_correction_bias else None


@settings(max_examples=100, deadline=None)
@given(cases())
def test_agrees_with_a_plain_loop(case: tuple[LayerSpec, list[list[float]], list[float] | None]) -> None:
    spec, rows, bias = case
    bias_tensor = None if bias is None else torch.tensor(bias)
    ids, weights = route(torch.tensor(rows, dtype=torch.float64), spec, bias_tensor)
    ids32, weights32 = route(torch.tensor(rows), spec, bias_tensor)
    assert (ids.dtype, weights.dtype, weights32.dtype) == (torch.int32, torch.float64, torch.float32)
    for t, row in enumerate(rows):
        if spec.routing.num_groups > 1 and nearly_ties(row, spec.routing, bias or [0.0] * len(row)):
            continue
        want_ids, want_weights = plain_route(row, spec, bias)
        assert ids[t].tolist() == want_ids == ids32[t].tolist()
        assert weights[t].tolist() == pytest.approx(want_weights, rel=1e-12)
        assert weights32[t].tolist() == pytest.approx(want_weights, rel=1e-6)


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_agrees_with_the_router_of_transformers(model_type: str) -> None:
    model = build_model(model_type)
    config = model.config.get_text_config().to_dict()
    spec = list(layer_specs(config, FAMILIES[model_type]))[2]
    assert isinstance(spec, LayerSpec)
    router = router_of(moe_block(model, 2)).float()
    hidden = torch.randn(64, spec.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        _, want_weights, want_ids = router(hidden.float())
        logits = gate_logits(hidden, router.weight)
    ids, weights = route(logits, spec, getattr(router, "e_score_correction_bias", None))
    assert_same_routing(ids, weights, want_ids, want_weights, spec.num_experts)


def test_top_k_then_softmax_agrees_with_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=40, num_local_experts=16, num_experts_per_tok=3)
    router = GptOssTopKRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(2))
    torch.nn.init.zeros_(router.bias)
    hidden = torch.randn(64, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        _, want_weights, want_ids = router(hidden.float())
        ids, weights = route(gate_logits(hidden, router.weight), make_spec(TOPK_SOFTMAX))
    assert_same_routing(ids, weights, want_ids, want_weights, 16)


def assert_same_routing(ids: Tensor, weights: Tensor, want_ids: Tensor, want_weights: Tensor, experts: int) -> None:
    """Equal as a map from expert to weight: transformers leaves the order of the k open."""
    ours, theirs = (
        torch.zeros(len(ids), experts, dtype=torch.float64).scatter_(1, i.long(), w.double())
        for i, w in ((ids, weights), (want_ids, want_weights))
    )
    assert torch.equal(ours != 0, theirs != 0)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("routing", ALL_METHODS)
def test_equal_scores_go_to_the_lowest_experts(routing: RoutingSpec) -> None:
    spec = make_spec(routing, num_experts=256, top_k=10)
    bias = torch.zeros(256) if routing.has_correction_bias else None
    ids, _ = route(torch.full((4, 256), 0.5), spec, bias)
    assert ids.tolist() == [list(range(10))] * 4


@pytest.mark.parametrize("num_experts", [8, 60, 128, 256])
@pytest.mark.parametrize("routing", ALL_METHODS)
def test_a_token_is_routed_alike_alone_and_in_any_batch(routing: RoutingSpec, num_experts: int) -> None:
    spec = make_spec(routing, num_experts)
    bias = make_bias(spec)
    logits = torch.randn(330, num_experts, generator=torch.Generator().manual_seed(4)) * 3
    before = logits.clone()
    ids, weights = route(logits, spec, bias)
    assert torch.equal(logits, before)
    for t in range(0, 330, 5):
        alone_ids, alone_weights = route(logits[t : t + 1], spec, bias)
        assert torch.equal(alone_ids[0], ids[t])
        assert torch.equal(alone_weights[0], weights[t])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("routing", ALL_METHODS)
def test_a_poisoned_token_disturbs_no_other(routing: RoutingSpec, poison: float) -> None:
    spec = make_spec(routing)
    bias = make_bias(spec)
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(6))
    clean_ids, clean_weights = route(logits, spec, bias)
    dirty = logits.clone()
    dirty[2, 7] = poison
    dirty[4] = poison
    ids, weights = route(dirty, spec, bias)
    others = torch.tensor([0, 1, 3, 5])
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(weights[others], clean_weights[others])
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())
    if math.isnan(poison):
        assert weights[[2, 4]].isnan().all()


def test_no_tokens_give_no_routes() -> None:
    for routing in ALL_METHODS:
        spec = make_spec(routing)
        ids, weights = route(torch.empty(0, 16), spec, make_bias(spec))
        assert ids.shape == weights.shape == (0, 3)


def test_wrong_shapes_and_a_missing_bias_are_errors() -> None:
    with pytest.raises(ValueError, match=r"\[T, 16\], got \[2, 15\]"):
        route(torch.zeros(2, 15), make_spec(SOFTMAX))
    with pytest.raises(ValueError, match="has_correction_bias is True"):
        route(torch.zeros(2, 16), make_spec(GROUPED))
    with pytest.raises(ValueError, match="has_correction_bias is False"):
        route(torch.zeros(2, 16), make_spec(SOFTMAX), torch.zeros(16))


@pytest.mark.parametrize(
    ("groups", "kept", "experts", "top_k"),
    [(3, 1, 16, 2), (0, 1, 16, 2), (4, 5, 16, 2), (4, 0, 16, 2), (16, 4, 16, 2), (8, 2, 16, 5)],
)
def test_groups_that_cannot_be_chosen_from_are_refused(groups: int, kept: int, experts: int, top_k: int) -> None:
    routing = RoutingSpec(method=RoutingMethod.SIGMOID_GROUPED, num_groups=groups, topk_groups=kept)
    with pytest.raises(UnsupportedCheckpointError, match=r"layer 0: .* groups of"):
        make_spec(routing, experts, top_k)


@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hidden_size", "num_experts"), [(40, 8), (97, 3), (512, 60), (1030, 128)])
def test_gate_logits_are_exact_to_fp32_and_batch_invariant(
    hidden_size: int, num_experts: int, router_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(70, hidden_size, generator=generator).bfloat16()
    router = torch.randn(num_experts, hidden_size, generator=generator).to(router_dtype)
    logits = gate_logits(hidden, router)
    truth = hidden.double() @ router.double().T
    magnitude = hidden.double().abs() @ router.double().abs().T
    assert logits.dtype == torch.float32
    assert ((logits - truth).abs() <= 2**-20 * magnitude).all()
    torch.testing.assert_close(gate_logits(hidden.double(), router), truth, rtol=1e-12, atol=1e-12)
    for size in (1, 2, 31, 32, 33, 69):
        start = 70 - size
        assert torch.equal(gate_logits(hidden[start:], router), logits[start:])


def test_a_nan_token_leaves_the_logits_of_others_alone() -> None:
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(40, 96, generator=generator).bfloat16()
    router = torch.randn(60, 96, generator=generator).bfloat16()
    clean = gate_logits(hidden, router)
    hidden[3] = torch.nan
    hidden[17, 5] = torch.inf
    dirty = gate_logits(hidden, router)
    others = [t for t in range(40) if t not in (3, 17)]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[3].isnan().all()
    assert not dirty[17].isfinite().any()
    assert gate_logits(hidden[:0], router).shape == (0, 60)
