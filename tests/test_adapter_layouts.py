"""Adapters written by hand in every layout are read back as the formula says."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    PACKED_CONFIG,
    PREFIX,
    RANK,
    SHARED,
    WIDTH,
    Lora,
    assert_adapter_is,
    assert_same_delta,
    delta_of,
    draw,
    moe_model,
    refusal,
    tensors_of,
    write_folder,
    write_layout,
)
from moelet.layer.adapter import AdapterLayout
from moelet.layer.adapter_loading import load_adapter

MODEL = moe_model()
SPEC = MODEL.layers[1]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_by_the_formula(tmp_path: Path, layout: str) -> None:
    drawn = write_layout(tmp_path, layout, MODEL)
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert_adapter_is(adapter, drawn, scaling=6 / RANK)
    assert adapter.ignored_keys == ()
    shared = layout.startswith("shared_outer")
    assert adapter.layout is (AdapterLayout.SHARED_OUTER if shared else AdapterLayout.PER_EXPERT)
    assert adapter.targets == ("gate", "up", "down")
    assert (adapter.path, adapter.rank, adapter.lora_alpha, adapter.scaling) == (tmp_path, RANK, 6.0, 2.0)


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    rank=st.integers(1, 9),
    experts=st.integers(1, 6),
    alpha=st.sampled_from([0, 1, 6, 0.5, 7.25]),
    rslora=st.booleans(),
)
def test_round_trip(layout: str, rank: int, experts: int, alpha: float, rslora: bool) -> None:
    model = moe_model(experts=experts)
    with tempfile.TemporaryDirectory() as folder:
        drawn = write_layout(Path(folder), layout, model, rank=rank, lora_alpha=alpha, use_rslora=rslora)
        adapter = load_adapter(Path(folder), model, max_rank=9)
    assert_adapter_is(adapter, drawn, scaling=alpha / (rank**0.5 if rslora else rank))
    assert adapter.max_rank == rank


def test_canonical_tensors_have_the_promised_types(tmp_path: Path) -> None:
    write_layout(tmp_path, "shared_outer", MODEL)
    layer = load_adapter(tmp_path, MODEL, max_rank=8).layers[1]
    assert layer.gate is not None
    assert layer.down is not None
    assert [tuple(t.shape) for t in (layer.gate.a, layer.gate.b)] == [(1, RANK, HIDDEN), (EXPERTS, WIDTH, RANK)]
    assert [tuple(t.shape) for t in (layer.down.a, layer.down.b)] == [(EXPERTS, RANK, WIDTH), (1, HIDDEN, RANK)]
    assert {layer.gate.a.dtype, layer.gate.b.dtype} == {torch.bfloat16}
    assert (layer.gate.scaling.dtype, layer.gate.ranks.dtype) == (torch.float32, torch.int32)
    assert layer.gate.ranks.tolist() == [RANK] * EXPERTS
    assert all(t.is_contiguous() for _, lora in layer.items() for t in (lora.a, lora.b))


@pytest.mark.parametrize(
    "layout", ["fused_per_expert", "stacked_fused", "shared_outer_fused", "packed", "packed_swapped"]
)
def test_one_a_for_gate_and_up_is_stored_once(tmp_path: Path, layout: str) -> None:
    write_layout(tmp_path, layout, MODEL)
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    layer = adapter.layers[2]
    assert layer.gate is not None
    assert layer.up is not None
    assert layer.gate.a.data_ptr() == layer.up.a.data_ptr()
    assert layer.gate.b.data_ptr() != layer.up.b.data_ptr()
    assert adapter.nbytes < sum(lora.nbytes for part in adapter.layers.values() for _, lora in part.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [("down",), ("gate", "up")])
def test_one_sided_adapters_leave_the_other_side_alone(tmp_path: Path, layout: str, kept: tuple[str, ...]) -> None:
    loras = {name: lora for name, lora in draw(layout, SPEC).items() if name in kept}
    config = {}
    if layout.startswith("packed"):
        config = {"target_parameters": ["experts.down_proj" if kept == ("down",) else "experts.gate_up_proj"]}
    write_folder(tmp_path, tensors_of(layout, 1, loras), **config)
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


@pytest.mark.parametrize("layout", ["per_expert", "mixtral", "stacked", "shared_outer"])
def test_gate_without_up(tmp_path: Path, layout: str) -> None:
    loras = {"gate": draw(layout, SPEC)["gate"]}
    write_folder(tmp_path, tensors_of(layout, 1, loras))
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


def test_some_experts_alone_and_each_of_its_own_rank(tmp_path: Path) -> None:
    a, b = random(4, HIDDEN), random(WIDTH, 4, seed=1)
    other_a, other_b = random(1, HIDDEN, seed=2), random(WIDTH, 1, seed=3)
    module = f"{PREFIX}layers.2.mlp.experts"
    tensors = {
        f"{module}.4.up_proj.lora_A.weight": a,
        f"{module}.4.up_proj.lora_B.weight": b,
        f"{module}.1.up_proj.lora_A.weight": other_a,
        f"{module}.1.up_proj.lora_B.weight": other_b,
    }
    patterns = {"rank_pattern": {"experts.1.up_proj": 1}, "alpha_pattern": {r".*\.4\.up_proj": 10}}
    write_folder(tmp_path, tensors, r=4, **patterns)
    up = load_adapter(tmp_path, MODEL, max_rank=4).layers[2].up
    assert up is not None
    assert up.ranks.tolist() == [0, 1, 0, 0, 4]
    assert_same_delta(delta_of(up, 4), 10 / 4 * b.double() @ a.double())
    assert_same_delta(delta_of(up, 1), 6 / 1 * other_b.double() @ other_a.double())
    assert not any(up.a[expert].any() or up.b[expert].any() for expert in (0, 2, 3))


def test_gate_up_and_down_of_different_ranks_in_one_packed_adapter(tmp_path: Path) -> None:
    gate_up, down = draw("packed", SPEC, rank=5), draw("packed", SPEC, rank=2)
    loras = {"gate": gate_up["gate"], "up": gate_up["up"], "down": down["down"]}
    patterns = {"rank_pattern": {"experts.gate_up_proj": 5}, "alpha_pattern": {"experts.gate_up_proj": 15}}
    write_folder(tmp_path, tensors_of("packed", 1, loras), r=2, lora_alpha=6, **patterns, **PACKED_CONFIG)
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=3.0)


def test_shared_outer_and_per_expert_layers_mix(tmp_path: Path) -> None:
    outer, plain = draw("shared_outer", MODEL.layers[1]), draw("per_expert", MODEL.layers[2])
    write_folder(tmp_path, tensors_of("shared_outer", 1, outer) | tensors_of("per_expert", 2, plain))
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert_adapter_is(adapter, {1: outer, 2: plain}, scaling=2.0)
    assert adapter.layout is AdapterLayout.MIXED


def test_tinker_names_shared_outer_stacks_w1_w2_w3(tmp_path: Path) -> None:
    loras = draw("shared_outer", SPEC)
    module = f"{PREFIX}layers.1.mlp.experts"
    tensors = {}
    for name, projection in {"w1": "gate", "w3": "up", "w2": "down"}.items():
        tensors[f"{module}.{name}.lora_A.weight"] = loras[projection].a.clone()
        tensors[f"{module}.{name}.lora_B.weight"] = loras[projection].b.clone()
    write_folder(tmp_path, tensors)
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


@pytest.mark.parametrize("name", ["shared_expert", "shared_experts"])
def test_shared_experts_have_their_own_width(tmp_path: Path, name: str) -> None:
    model = moe_model(shared=SHARED)
    loras = {
        "gate": Lora(random(1, RANK, HIDDEN), random(1, SHARED, RANK, seed=1)),
        "up": Lora(random(1, RANK, HIDDEN, seed=2), random(1, SHARED, RANK, seed=3)),
        "down": Lora(random(1, RANK, SHARED, seed=4), random(1, HIDDEN, RANK, seed=5)),
    }
    routed = draw("packed", SPEC)
    tensors = tensors_of("packed", 1, routed)
    for projection, lora in loras.items():
        module = f"{PREFIX}layers.1.mlp.{name}.{projection}_proj"
        tensors |= {f"{module}.lora_A.weight": lora.a[0].clone(), f"{module}.lora_B.weight": lora.b[0].clone()}
    write_folder(tmp_path, tensors, **PACKED_CONFIG)
    wanted = routed | {f"shared_{projection}": lora for projection, lora in loras.items()}
    assert_adapter_is(load_adapter(tmp_path, model, max_rank=8), {1: wanted}, scaling=2.0)


@pytest.mark.parametrize("orientation", ["packed", "packed_swapped"])
@pytest.mark.parametrize("sizes", [{"hidden": 48, "width": 24}, {"hidden": 24, "width": 24}])
def test_a_square_tensor_is_oriented_like_its_sibling(tmp_path: Path, orientation: str, sizes: dict[str, int]) -> None:
    model = moe_model(**sizes)
    drawn = write_layout(tmp_path, orientation, model)
    assert_adapter_is(load_adapter(tmp_path, model, max_rank=8), drawn, scaling=2.0)


@pytest.mark.parametrize("orientation", ["packed", "packed_swapped"])
def test_a_square_tensor_without_a_sibling_is_refused(tmp_path: Path, orientation: str) -> None:
    model = moe_model(hidden=48, width=24)
    loras = draw(orientation, model.layers[1])
    tensors = tensors_of(orientation, 1, {"gate": loras["gate"], "up": loras["up"]})
    write_folder(tmp_path, tensors, target_parameters=["mlp.experts.gate_up_proj"])
    error = refusal(tmp_path, model)
    assert error.key == f"{PREFIX}layers.1.mlp.experts.lora_A.weight"
    assert "square" in error.expected


def test_the_sibling_may_lie_in_another_layer(tmp_path: Path) -> None:
    model = moe_model(hidden=48, width=24)
    drawn = {index: draw("packed_swapped", spec) for index, spec in model.layers.items()}
    kept = {1: {name: drawn[1][name] for name in ("gate", "up")}, 2: {"down": drawn[2]["down"]}}
    tensors = {key: value for index in kept for key, value in tensors_of("packed_swapped", index, kept[index]).items()}
    names = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"]
    write_folder(tmp_path, tensors, target_parameters=names)
    assert_adapter_is(load_adapter(tmp_path, model, max_rank=8), kept, scaling=2.0)


def test_wrappers_may_be_nested_deeper(tmp_path: Path) -> None:
    loras = draw("packed", SPEC)
    tensors = {
        key.replace(".experts.", ".experts.base_layer."): value for key, value in tensors_of("packed", 1, loras).items()
    }
    assert any("base_layer.base_layer" in key for key in tensors)
    write_folder(tmp_path, tensors, **PACKED_CONFIG)
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


def test_fused_gate_and_up_adapters_are_taken_apart(tmp_path: Path) -> None:
    """PEFT stacks two adapters of rank 3 to one of rank 6 whose B is block-diagonal; a slot of rank 3 holds them."""
    loras = draw("per_expert", SPEC)
    gate, up = loras["gate"], loras["up"]
    empty = torch.zeros_like(gate.b)
    fused = {
        "gate": Lora(torch.cat([gate.a, up.a], dim=1), torch.cat([gate.b, empty], dim=2)),
        "up": Lora(torch.cat([gate.a, up.a], dim=1), torch.cat([empty, up.b], dim=2)),
    }
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {r".*\.gate_up_proj": 12}}
    parameters = ["gate_up_proj", "down_proj"]
    down = tensors_of("packed", 1, {"down": loras["down"]})
    inner = {
        key.replace("experts.", "experts.base_layer."): value for key, value in tensors_of("packed", 1, fused).items()
    }
    write_folder(tmp_path, inner | down, target_parameters=parameters, target_modules=[], **patterns)
    adapter = load_adapter(tmp_path, MODEL, max_rank=3)
    assert_adapter_is(adapter, {1: loras}, scaling=2.0)
    assert adapter.max_rank == 3


def test_a_fused_adapter_of_zeros_keeps_its_rank(tmp_path: Path) -> None:
    loras = {name: Lora(lora.a, torch.zeros_like(lora.b)) for name, lora in draw("packed", SPEC, rank=4).items()}
    write_folder(tmp_path, tensors_of("packed", 1, loras), r=4, **PACKED_CONFIG)
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert adapter.max_rank == 4
    assert_adapter_is(adapter, {1: loras}, scaling=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_cast_to_bf16(tmp_path: Path, dtype: torch.dtype) -> None:
    loras = draw("stacked", SPEC)
    write_folder(tmp_path, {key: value.to(dtype) for key, value in tensors_of("stacked", 1, loras).items()})
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


def test_a_slice_reads_every_expert(tmp_path: Path) -> None:
    drawn = write_layout(tmp_path, "per_expert", MODEL)
    sliced = moe_model()
    for index, spec in sliced.layers.items():
        sliced.layers[index] = spec.expert_slice(3, 2)  # type: ignore[index]
    assert_adapter_is(load_adapter(tmp_path, sliced, max_rank=8), drawn, scaling=2.0)
