"""The memory plan against what the engine's parts allocate, without a GPU."""

from dataclasses import replace

import pytest

from fake_layer import LayerDriver
from moelet.graphs.buffers import plan_buffers
from moelet.graphs.geometry import Geometry
from moelet.graphs.options import GraphOptions
from moelet.graphs.planning import plan_memory
from moelet.graphs.pool import arena_memory
from moelet.layer.layout import PackedShape
from moelet.layer.spec import LayerSpec
from random_layers import SHARED_SPEC, SPEC, model_of

OPTIONS = GraphOptions(max_loras=3, max_lora_rank=12, max_decode_tokens=8, decode_shapes=(1, 8), max_eager_tokens=20)


@pytest.mark.parametrize("spec", [SPEC, SHARED_SPEC], ids=["plain", "shared"])
def test_bytes_are_those_of_the_padded_tensors(spec: LayerSpec) -> None:
    plan = plan_memory(model_of(spec), OPTIONS)
    experts = spec.num_local_experts + spec.num_shared_chunks
    packed = PackedShape(2 * spec.intermediate_size, spec.hidden_size, 128).nbytes(experts)
    packed += PackedShape(spec.hidden_size, spec.intermediate_size, 128).nbytes(experts)
    assert packed <= plan.weight_bytes <= packed + spec.num_experts * (spec.hidden_size + 64) * 2
    assert plan.all_slots_bytes == 3 * plan.slot_bytes
    matrices = 2 * spec.hidden_size + spec.intermediate_size + 2 * spec.intermediate_size + spec.hidden_size
    assert plan.slot_bytes > experts * matrices * 16 * 2, "ranks are stored in blocks of eight: 12 takes 16"


def test_shapes_are_planned_as_they_are_allocated() -> None:
    plan = plan_memory(model_of(SPEC), OPTIONS)
    geometry = Geometry.of(SPEC, router_fp32=False, max_loras=3, max_lora_rank=12)
    assert [(shape.tokens, shape.captured) for shape in plan.shapes] == [(1, True), (8, True), (20, False)]
    for shape in plan.shapes:
        assert shape.base_arena_bytes == plan_buffers(geometry, shape.tokens, lora=False).total_bytes
        buffers = plan_buffers(geometry, shape.tokens, lora=True, apart=shape.captured)
        assert shape.lora_arena_bytes == buffers.total_bytes
    assert plan.arena_bytes == max(shape.lora_arena_bytes for shape in plan.shapes)
    assert {row.name for row in plan.buffers} == set(plan_buffers(geometry, 20, lora=True, apart=False).buffers)


def test_layers_that_are_alike_share_their_shapes() -> None:
    model = model_of(SPEC)
    two = replace(model, layers={2: SPEC, 5: replace(SPEC, index=5)})
    assert [shape.layers for shape in plan_memory(two, OPTIONS).shapes] == ["2,5"] * 3
    assert plan_memory(two, OPTIONS).weight_bytes == 2 * plan_memory(model, OPTIONS).weight_bytes
    assert plan_memory(two, OPTIONS).arena_bytes == plan_memory(model, OPTIONS).arena_bytes


LIMITS = [((1,), 1025, 128, 8, 128, 128, 8), ((300,), 2049, 128, 3, 8, 128, 1), ((8,), 600, 6, 3, 40, 72, 3)]


@pytest.mark.parametrize(("shapes", "eager", "experts", "top_k", "width", "hidden", "slots"), LIMITS)
def test_the_arena_holds_every_shape(
    shapes: tuple[int, ...],
    eager: int,
    experts: int,
    top_k: int,
    width: int,
    hidden: int,
    slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A smaller shape may need more: of more tokens tiles and adapter groups are larger, and so fewer."""
    pytest.importorskip("cuda.bindings.driver")
    LayerDriver().install(monkeypatch)
    spec = replace(
        SPEC, hidden_size=hidden, intermediate_size=width, num_experts=experts, num_local_experts=-1, top_k=top_k
    )
    geometry = Geometry.of(spec, router_fp32=False, max_loras=slots, max_lora_rank=8)
    memory = arena_memory([geometry], shapes, eager)
    options = GraphOptions(
        decode_shapes=shapes,
        max_decode_tokens=shapes[-1],
        max_eager_tokens=eager,
        max_loras=slots,
        max_lora_rank=8,
    )
    plan = plan_memory(model_of(spec), options)
    assert memory.num_bytes >= max(shape.lora_arena_bytes for shape in plan.shapes) == plan.arena_bytes
