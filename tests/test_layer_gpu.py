"""The whole layer on a real GPU against float64 by the tolerance rule, over the shapes that checkpoints have."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gpu_engines import GPU, Expected, Gpu, big_weights, expected, gpu, moved, opened_engine, same_bits
from lora_cases import mixture, of_rank, only, ragged, scaled, uneven
from moelet.graphs.engine import GraphEngine
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from moelet.layer.routing import route
from moelet.layer.spec import LayerSpec, RoutingMethod, RoutingSpec
from moelet.layer.weights import LayerWeights
from oracle import assert_close_to_truth
from random_layers import random_batch, random_weights, slice_weights

pytestmark = pytest.mark.gpu

RENORMALIZED = RoutingSpec(renormalize=True)
TOPK_SOFTMAX = RoutingSpec(method=RoutingMethod.TOPK_SOFTMAX)
GROUPED = RoutingSpec(
    method=RoutingMethod.SIGMOID_GROUPED,
    renormalize=True,
    num_groups=8,
    topk_groups=4,
    has_correction_bias=True,
    routed_scaling_factor=2.5,
)


def layer_spec(hidden: int, width: int, experts: int, top_k: int, routing: RoutingSpec, shared: int = 0) -> LayerSpec:
    """``shared`` experts are gated unless their width is odd in hundreds."""
    return LayerSpec(
        index=1,
        hidden_size=hidden,
        intermediate_size=width,
        num_experts=experts,
        top_k=top_k,
        routing=routing,
        shared_intermediate_size=shared,
        shared_gated=shared > 0 and routing is RENORMALIZED,
    )


SPECS = {
    "qwen3-30b": layer_spec(2048, 768, 128, 8, RENORMALIZED),
    "qwen3.5-35b": layer_spec(2048, 512, 256, 8, RENORMALIZED, 512),
    "mixtral": layer_spec(4096, 14336, 8, 2, TOPK_SOFTMAX),
    "60 experts, two and a half shared": layer_spec(2880, 1408, 60, 4, RENORMALIZED, 3520),
    "grouped, odd widths": layer_spec(960, 200, 256, 8, GROUPED, 500),
    "one expert": layer_spec(1408, 960, 1, 1, TOPK_SOFTMAX),
    "eight experts": layer_spec(1408, 2880, 8, 3, RoutingSpec()),
}
TOKENS = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65, 257, 300)
MOST_TOKENS = 2048
ELEMENTS = 20_000
"""Fewer elements than this make the ratio of two errors a matter of luck: small batches are told together."""
OPTIONS = {
    "max_loras": 8,
    "max_lora_rank": 64,
    "max_decode_tokens": 256,
    "decode_shapes": (1, 2, 4, 8, 16, 32, 64, 128),
    "max_eager_tokens": MOST_TOKENS,
}
SLOTS = [0, -1, 1, 2, 3, -1, 4, 5, 6, 7, 5]


@dataclass
class Case:
    """One layer in an engine, with eight adapters in its slots."""

    engine: GraphEngine
    spec: LayerSpec
    weights: LayerWeights
    adapters: list[Adapter | None]


@pytest.fixture(scope="module", params=SPECS)
def case(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[Case]:  # noqa: ARG001 (skips without one)
    spec = SPECS[request.param]
    weights = big_weights(spec)
    adapters = [moved(adapter, "cpu") for adapter in mixture(spec, GPU)]
    with opened_engine(spec, weights, **OPTIONS) as engine:
        for slot, adapter in enumerate(adapters):
            assert adapter is not None
            engine.install_adapter(slot, adapter)
        yield Case(engine, spec, weights, adapters)
    torch.cuda.empty_cache()


def windows(spec: LayerSpec, tokens: int, most: int) -> list[slice]:
    """Places to take ``tokens`` from a batch of ``most``, enough of them for ``ELEMENTS``."""
    count = max(-(-ELEMENTS // (tokens * spec.hidden_size)), 1)
    step = max((most - tokens) // count, 1)
    starts = sorted({min(step * i, most - tokens) for i in range(count)})
    return [slice(start, start + tokens) for start in starts]


def check_sizes(
    case: Case, batch: LayerBatch, sizes: Sequence[int] = TOKENS, adapters: Sequence[Adapter | None] = ()
) -> None:
    """The batch whole, and in parts of every size: close to the truth, and the same bits as the whole.

    With adapters a wide GEMM sums otherwise: the bits are then those of the batch in parts of the decode limit, and a
    part that is larger need only be close.
    """
    known, limit = expected(case.spec, case.weights, batch, adapters), case.engine.batch_tokens
    whole = case.engine.forward(batch)
    assert_close_to_truth(whole, known.truth, known.baseline)
    assert same_bits(case.engine.forward(batch), whole), "a forward differs from itself"
    if adapters:
        starts = range(0, batch.num_tokens, limit)
        whole = torch.cat([case.engine.forward(batch.part(start, start + limit)) for start in starts])
    for tokens in sizes:
        if tokens == 0:
            assert case.engine.forward(batch.part(0, 0)).shape == (0, case.spec.hidden_size)
            continue
        parts = windows(case.spec, tokens, batch.num_tokens)
        value = torch.cat([case.engine.forward(batch.part(part.start, part.stop)) for part in parts])
        same = same_bits(value, torch.cat([whole[part] for part in parts]))
        assert same or (adapters and tokens > limit), f"{tokens} tokens differ from the whole"
        truth, baseline = (torch.cat([side[part] for part in parts]) for side in known)
        assert_close_to_truth(value, truth, baseline)


@pytest.mark.parametrize("lora", [False, True], ids=["base", "eight adapters"])
def test_every_number_of_tokens(case: Case, lora: bool) -> None:
    batch = random_batch(case.spec, MOST_TOKENS, seed=1, slots=SLOTS if lora else None, drop=0.1)
    check_sizes(case, batch, adapters=case.adapters if lora else ())


@pytest.mark.parametrize("lora", [False, True], ids=["base", "eight adapters"])
@pytest.mark.parametrize("pattern", ["one expert", "few experts"])
def test_crowded_and_empty_experts(case: Case, pattern: str, lora: bool) -> None:
    spec = case.spec
    batch = random_batch(spec, 300, seed=2, slots=SLOTS if lora else None)
    assert batch.topk_ids is not None
    if pattern == "one expert":
        batch.topk_ids.fill_(-1)[:, -1] = spec.num_experts - 1
    else:
        batch.topk_ids.copy_(batch.topk_ids[torch.arange(300) % 2])
    check_sizes(case, batch, (1, 33, 65, 257), case.adapters if lora else ())


def clear_choices(spec: LayerSpec, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Which tokens choose the same experts however their logits are nudged: the others may go either way in fp32."""
    ids = route(logits, spec, bias)[0].sort(dim=1).values
    clear = torch.ones(len(logits), dtype=torch.bool)
    for seed in range(8):
        nudge = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-5
        clear &= (route(logits + nudge, spec, bias)[0].sort(dim=1).values == ids).all(dim=1)
    return clear


@pytest.mark.parametrize("lora", [False, True], ids=["base", "eight adapters"])
@pytest.mark.parametrize("kind", ["gate", "logits"])
def test_routing_by_the_layer_itself(case: Case, kind: str, lora: bool) -> None:
    spec, weights = case.spec, case.weights
    batch = random_batch(spec, 300, seed=3, slots=SLOTS if lora else None)
    logits = batch.hidden_states.double() @ weights.router.double().T
    if kind == "logits":
        logits = torch.randn(300, spec.num_experts, generator=torch.Generator().manual_seed(3)).double()
    batch = replace(batch, topk_ids=None, topk_weights=None, router_logits=logits.float() if kind == "logits" else None)
    known = expected(spec, weights, batch, case.adapters if lora else ())
    clear = clear_choices(spec, logits, weights.correction_bias)
    assert clear.sum() >= 290
    whole = case.engine.forward(batch)
    assert_close_to_truth(whole[clear], known.truth[clear], known.baseline[clear])
    # with adapters, wide GEMMs sum otherwise than those of the decode limit
    few = case.engine.forward(batch.part(0, case.engine.batch_tokens)) if lora else whole
    for part in (slice(0, 1), slice(7, 40), slice(40, 105)):
        assert same_bits(case.engine.forward(batch.part(part.start, part.stop)), few[part])


@pytest.mark.parametrize("top_k", range(1, 11))
def test_every_top_k(gpu: Gpu, top_k: int) -> None:  # noqa: ARG001
    spec = layer_spec(264, 136, 12, top_k, RENORMALIZED, 200)
    weights = random_weights(spec)
    adapters: list[Adapter | None] = [ragged(spec, 13), of_rank(spec, 8, shared_outer=True)]
    options = {**OPTIONS, "decode_shapes": (1, 8), "max_decode_tokens": 64, "max_eager_tokens": 160}
    with opened_engine(spec, weights, **options) as engine:
        for slot, adapter in enumerate(adapters):
            assert adapter is not None
            engine.install_adapter(slot, adapter)
        batch = random_batch(spec, 150, slots=[0, -1, 1], drop=0.1)
        check_sizes(Case(engine, spec, weights, adapters), batch, (1, 8, 33, 64, 65), adapters)


EP = layer_spec(1408, 960, 16, 4, RENORMALIZED, 500)
EP_OPTIONS = {**OPTIONS, "decode_shapes": (8, 64), "max_decode_tokens": 128, "max_eager_tokens": 300}


def test_slices_of_an_expert_parallel_group_add_up(gpu: Gpu) -> None:  # noqa: ARG001
    """Offsets above 0, the shared experts in the first slice alone, outer matrices counted once."""
    weights = random_weights(EP)
    adapters: list[Adapter | None] = [of_rank(EP, 16, shared_outer=True), ragged(EP, 20), None]
    batch = random_batch(EP, 300, seed=5, slots=[0, 1, -1], drop=0.1)
    outputs, baselines = [], []
    for offset, count in ((0, 4), (4, 4), (8, 7), (15, 1)):
        spec = EP.expert_slice(offset, count)
        mine = slice_weights(spec, weights)
        known = expected(spec, mine, batch, adapters)
        with opened_engine(spec, mine, **EP_OPTIONS) as engine:
            for slot, adapter in enumerate(adapters):
                if adapter is not None:
                    engine.install_adapter(slot, adapter)
            value = engine.forward(batch)
            parts = torch.cat([engine.forward(batch.part(start, start + 60)) for start in range(0, 300, 60)])
        assert_close_to_truth(parts, known.truth, known.baseline)
        assert_close_to_truth(value, known.truth, known.baseline)
        outputs.append(value.double())
        baselines.append(known.baseline.double())
    whole: Expected = expected(EP, weights, batch, adapters)
    assert_close_to_truth(sum(outputs, torch.zeros(())), whole.truth, sum(baselines, torch.zeros(())))


ONE_SIDED = [("gate",), ("up",), ("down",), ("gate", "down"), ("shared_up", "shared_down"), ("gate", "shared_gate")]


def test_one_sided_uneven_and_scaled_adapters(gpu: Gpu) -> None:  # noqa: ARG001
    spec = layer_spec(520, 296, 12, 4, RENORMALIZED, 200)
    weights, full = random_weights(spec), of_rank(spec, 16)
    adapters: list[Adapter | None] = [only(spec, full, *names) for names in ONE_SIDED]
    adapters += [scaled(spec, full, 0.0), scaled(spec, full, -2.0), uneven(spec, 20, 3), uneven(spec, 0, 24)]
    batch = random_batch(spec, 300, seed=6, slots=[-1, *range(10)])
    options = {**OPTIONS, "max_loras": 10, "decode_shapes": (8, 64), "max_eager_tokens": 300}
    with opened_engine(spec, weights, **options) as engine:
        for slot, adapter in enumerate(adapters):
            assert adapter is not None
            engine.install_adapter(slot, adapter)
        check_sizes(Case(engine, spec, weights, adapters), batch, (8, 64, 200), adapters)


def test_an_engine_without_slots_runs_a_batch_beyond_its_limit_in_parts(gpu: Gpu) -> None:  # noqa: ARG001
    spec = layer_spec(264, 136, 12, 4, RENORMALIZED)
    weights, batch = random_weights(spec), random_batch(spec, 333, drop=0.1)
    options = {"max_loras": 0, "decode_shapes": (8,), "max_decode_tokens": 8, "max_eager_tokens": 100}
    with opened_engine(spec, weights, **options) as engine:
        check_sizes(Case(engine, spec, weights, []), batch, (8, 99, 100, 101, 201))
        with pytest.raises(EngineError, match="there is no adapter slot 0: there are none"):
            engine.install_adapter(0, of_rank(spec, 8))
        assert engine.memory_bytes["adapter_slots"] == 0
