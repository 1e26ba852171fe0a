"""The benchmarks' floors and workloads, none of which needs a GPU."""

import math
from typing import Any

import pytest
import torch
from benchmarks import peers, shapes
from benchmarks.floor import Hits, arithmetic_us, expected_experts, expert_bytes, matrix_bytes
from benchmarks.null_service import NullEngine
from benchmarks.workload import (
    Routing,
    Workload,
    exact_output,
    random_adapter,
    random_batches,
    random_weights,
    relative_error,
    worst,
)
from torch import Tensor

from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import LayerSpec
from random_layers import SHARED_SPEC, SPEC, model_of

Q30 = shapes.SHAPES["qwen3-30b-a3b"]


def batch_of(ids: list[list[int]], slots: list[int] | None) -> LayerBatch:
    return LayerBatch(
        layer=SPEC.index,
        hidden_states=torch.zeros(len(ids), SPEC.hidden_size, dtype=torch.bfloat16),
        topk_ids=torch.tensor(ids, dtype=torch.int32),
        topk_weights=torch.ones(len(ids), len(ids[0])),
        token_slots=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )


def test_floor_of_qwen3_is_the_known_one() -> None:
    """9.44 MB an expert; one pair at rank 16 is 0.27 MB: A of gate and up 131 KB, B 49, A of down 25, B 66."""
    assert expert_bytes(Q30) == 9_437_184
    assert [round(expected_experts(Q30, t), 1) for t in (1, 4, 64, 256)] == [8.0, 29.1, 125.9, 128.0]
    pair = matrix_bytes(Q30, Hits(0, 1, 1, 1), 16)
    assert pair == {"gate_up": 0, "down": 0, "a_gate_up": 131072, "b_gate_up": 49152, "a_down": 24576, "b_down": 65536}


def test_arithmetic_of_known_shapes() -> None:
    assert arithmetic_us(Q30, 8192) == pytest.approx(787.9, abs=0.1)
    assert arithmetic_us(shapes.SHAPES["qwen3-30b-a3b-ep4"], 8192) == pytest.approx(787.9 / 4, abs=0.1)
    whole = shapes.named("qwen3.5-35b-a3b", shared=True)
    assert arithmetic_us(whole, 64, 1.0) == 64 * 6 * 2048 * 512 * 9 * 1e-6


def test_hits_are_those_of_a_plain_loop() -> None:
    spec = SPEC.expert_slice(2, 3)
    ids = [[0, 2, 5], [2, 4, 1], [4, 2, -1], [0, 1, 5], [3, 2, 0]]
    slots = [0, 2, 2, 1, -1]
    local = [(slot, e) for slot, row in zip(slots, ids, strict=True) for e in row if 2 <= e < 5]
    pairs = {(slot, e) for slot, e in local if slot >= 0}
    hits = Hits.of(spec, batch_of(ids, slots))
    assert hits == Hits(len({e for _, e in local}), len(pairs), len({slot for slot, _ in pairs}), 3)
    assert hits == Hits(3, 3, 2, 3)
    assert Hits.of(spec, batch_of(ids, None)) == Hits(3, 0, 0, 0)


@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC], ids=["routed", "shared"])
def test_bytes_are_those_of_the_tensors_a_batch_meets(spec: LayerSpec, shared_outer: bool) -> None:
    rank, g = 5, torch.Generator().manual_seed(0)
    ids, slots = [[0, 1, 2], [0, 1, 3], [5, 1, 0]], [0, 1, -1]
    weights = random_weights(spec, g)
    adapters = [random_adapter(spec, rank, g, shared_outer=shared_outer) for _ in range(2)]
    experts = {e for row in ids for e in row}
    counted = sum(weights.gate_up[e].nbytes + weights.down[e].nbytes for e in experts)
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        counted += weights.shared_gate_up.nbytes + weights.shared_down.nbytes
    met = {(slot, e) for slot, row in zip(slots, ids, strict=True) for e in row if slot >= 0}
    for slot, adapter in enumerate(adapters):
        for name, lora in adapter.layers[spec.index].items():
            for matrix in (lora.a, lora.b):
                alone = len(matrix) == 1
                counted += matrix.nbytes if alone else sum(matrix[e].nbytes for s, e in met if s == slot)
                assert alone == (name.startswith("shared_") or (shared_outer and matrix is outer(name, lora)))
    hits = Hits.of(spec, batch_of(ids, slots))
    assert sum(matrix_bytes(spec, hits, rank, shared_outer=shared_outer).values()) == counted


def outer(name: str, lora: Any) -> Tensor:
    matrix: Tensor = lora.b if name == "down" else lora.a
    return matrix


def batches(spec: LayerSpec, count: int = 3, slots: int = 4, **work: Any) -> list[LayerBatch]:
    return random_batches(spec, Workload(**work), count, slots)


@pytest.mark.parametrize("routing", list(Routing))
def test_tokens_choose_different_experts(routing: Routing) -> None:
    for batch in batches(Q30, num_tokens=32, routing=routing):
        batch.check(Q30, max_loras=0)
        assert batch.topk_ids is not None
        assert all(len(set(row)) == Q30.top_k for row in batch.topk_ids.tolist())


def test_routings_differ_as_they_say() -> None:
    used = {routing: Hits.of(Q30, batches(Q30, 1, num_tokens=64, routing=routing)[0]).experts for routing in Routing}
    assert used[Routing.EIGHT] == 8
    assert used[Routing.EIGHT] < used[Routing.ZIPF] < used[Routing.UNIFORM]
    part = shapes.SHAPES["qwen3-30b-a3b-ep4"]
    assert Hits.of(part, batches(part, 1, num_tokens=64, routing=Routing.EIGHT)[0]).experts == 8
    uniform = [Hits.of(Q30, batch).experts for batch in batches(Q30, 40, num_tokens=16)]
    assert sum(uniform) / 40 == pytest.approx(expected_experts(Q30, 16), rel=0.03)


def test_base_and_lora_share_hidden_states_and_routing() -> None:
    base, other = batches(SPEC, num_tokens=9), batches(SPEC, num_tokens=9, rank=4, adapters=3)
    for one, two in zip(base, other, strict=True):
        assert one.topk_ids is not None
        assert two.topk_ids is not None
        assert two.token_slots is not None
        assert one.token_slots is None
        assert torch.equal(one.hidden_states, two.hidden_states)
        assert torch.equal(one.topk_ids, two.topk_ids)
        assert set(two.token_slots.tolist()) <= {0, 1, 2}
    assert not torch.equal(base[0].hidden_states, base[1].hidden_states)
    every = batches(SPEC, 1, num_tokens=6, rank=4, adapters="all")[0]
    assert every.token_slots is not None
    assert every.token_slots.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("shared_outer", [False, True])
@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC, SPEC.expert_slice(2, 3)], ids=["routed", "shared", "slice"])
def test_the_cpu_engine_gives_the_exact_output(spec: LayerSpec, shared_outer: bool) -> None:
    g = torch.Generator().manual_seed(1)
    weights = random_weights(spec, g)
    adapters = [random_adapter(spec, 4, g, shared_outer=shared_outer) for _ in range(2)]
    engine = ReferenceEngine(model_of(spec), {spec.index: weights}, max_loras=2, max_lora_rank=4)
    for slot, adapter in enumerate(adapters):
        engine.install_adapter(slot, adapter)
    base, lora = batches(spec, 1, num_tokens=7)[0], batches(spec, 1, num_tokens=7, rank=4, adapters=2)[0]
    truths = [exact_output(spec, weights, adapters, batch) for batch in (base, lora)]
    assert relative_error(engine.forward(base), truths[0]) < 0.01
    assert relative_error(engine.forward(lora), truths[1]) < 0.01
    assert relative_error(truths[1], truths[0]) > 0.1


def test_errors() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), truth))
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert math.isnan(worst([0.1, math.nan, 0.2]) or 0.0)
    assert worst([]) is None


@pytest.mark.parametrize("spec", [SPEC, SPEC.expert_slice(2, 3)], ids=["routed", "slice"])
def test_grouped_mm_computes_the_layer(spec: LayerSpec) -> None:
    weights = random_weights(spec, torch.Generator().manual_seed(2))
    batch = batches(spec, 1, num_tokens=11)[0]
    assert batch.topk_ids is not None
    assert batch.topk_weights is not None
    out = peers.grouped_mm(batch.hidden_states, batch.topk_ids, batch.topk_weights, weights, spec=spec)
    assert relative_error(out, exact_output(spec, weights, [], batch)) < 0.01


def test_the_null_engine_has_the_slots_that_it_says() -> None:
    engine, other = NullEngine(SPEC), ReferenceEngine(model_of(SPEC), {}, max_loras=1)
    adapter = random_adapter(SPEC, 1, torch.Generator().manual_seed(0))
    engine.install_adapter(0, adapter)
    engine.remove_adapter(0)
    for slot in (-1, 1):
        said = []
        for each in (engine, other):
            with pytest.raises(EngineError, match=f"no adapter slot {slot}:") as installing:
                each.install_adapter(slot, adapter)
            with pytest.raises(EngineError, match=f"no adapter slot {slot}:") as removing:
                each.remove_adapter(slot)
            said.append((str(installing.value), str(removing.value)))
        assert said[0] == said[1]


@pytest.mark.parametrize(
    "labels",
    [
        ["sort", "expert_mlp", "finalize"],
        ["sort", "gather", "lora_shrink of gate_up", "gate_up_gemm", "lora_shrink of down", "down_gemm", "finalize"],
    ],
)
def test_every_matrix_is_read_by_one_kernel(labels: list[str]) -> None:
    pytest.importorskip("cuda.bindings.driver")
    from benchmarks.kernels import FUSED_MATRICES

    found = [matrix for label in labels for matrix in FUSED_MATRICES.get(label, ())]
    assert sorted(found) == sorted(matrix_bytes(SPEC, Hits(1, 1, 1, 1), 8))
