"""Adapters whose tensors disagree with the base, with their configuration, or with each other are refused by key."""

from pathlib import Path

import pytest
import torch

from adapters import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    PACKED_CONFIG,
    PREFIX,
    RANK,
    WIDTH,
    draw,
    moe_model,
    refusal,
    tensors_of,
    write_folder,
    write_layout,
)
from moelet.layer.adapter_loading import load_adapter

MODEL = moe_model()
SPEC = MODEL.layers[1]
EXPERTS_OF_1 = f"{PREFIX}layers.1.mlp.experts"


def config_of(layout: str) -> dict[str, list[str]]:
    return PACKED_CONFIG if layout.startswith("packed") else {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", [{"hidden": HIDDEN + 8}, {"width": WIDTH + 8}, {"experts": EXPERTS - 1}])
def test_a_base_of_another_shape_is_refused(tmp_path: Path, layout: str, other: dict[str, int]) -> None:
    write_layout(tmp_path, layout, MODEL)
    error = refusal(tmp_path, moe_model(**other))
    assert ".layers.1." in error.key
    if "experts" not in other or layout not in ("per_expert", "mixtral", "fused_per_expert"):
        assert error.expected.startswith("shape [")
        assert error.found.startswith("[")


def test_more_experts_in_the_base_than_in_the_adapter_is_no_fault_of_per_expert_adapters(tmp_path: Path) -> None:
    write_layout(tmp_path, "per_expert", MODEL)
    up = load_adapter(tmp_path, moe_model(experts=EXPERTS + 1), max_rank=8).layers[1].up
    assert up is not None
    assert up.ranks.tolist() == [RANK] * EXPERTS + [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_other_than_the_configured_one_is_refused(tmp_path: Path, layout: str) -> None:
    write_layout(tmp_path, layout, MODEL, rank=4)
    config = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config.replace('"r": 4', '"r": 2'))
    error = refusal(tmp_path, MODEL)
    assert "(rank 2 by adapter_config.json)" in error.expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_over_the_limit_is_refused(tmp_path: Path, layout: str) -> None:
    write_layout(tmp_path, layout, MODEL, rank=6)
    assert load_adapter(tmp_path, MODEL, max_rank=6).max_rank == 6
    error = refusal(tmp_path, MODEL, max_rank=5)
    assert ".layers.1." in error.key
    assert (error.expected, error.found) == ("a rank of at most 5", "rank 6")


@pytest.mark.parametrize(
    "layout", ["fused_per_expert", "stacked_fused", "shared_outer_fused", "packed", "packed_swapped"]
)
@pytest.mark.parametrize("rank", [6, 7, 12])
def test_a_fused_rank_over_the_limit_is_refused_unless_it_comes_apart(tmp_path: Path, layout: str, rank: int) -> None:
    loras = {name: lora for name, lora in draw(layout, SPEC, rank=rank).items() if name != "down"}
    config = {"target_parameters": ["gate_up_proj"]} if layout.startswith("packed") else {}
    write_folder(tmp_path, tensors_of(layout, 1, loras), r=rank, **config)
    assert load_adapter(tmp_path, MODEL, max_rank=rank).max_rank == rank
    assert refusal(tmp_path, MODEL, max_rank=5).expected == "a rank of at most 5"


def test_only_ranks_that_are_served_count_for_the_limit(tmp_path: Path) -> None:
    tensors = tensors_of("per_expert", 1, draw("per_expert", SPEC, rank=1))
    attention = f"{PREFIX}layers.1.self_attn.q_proj"
    tensors |= {f"{attention}.lora_A.weight": torch.ones(64, HIDDEN), f"{attention}.lora_B.weight": torch.ones(32, 64)}
    write_folder(tmp_path, tensors, r=64, rank_pattern={r".*experts\..*": 1})
    assert load_adapter(tmp_path, MODEL, max_rank=1).max_rank == 1


@pytest.mark.parametrize("rank", [10**9, 2**63, 10**30])
@pytest.mark.parametrize("layout", ["per_expert", "stacked", "packed"])
def test_a_huge_rank_is_refused_and_nothing_of_it_allocated(tmp_path: Path, layout: str, rank: int) -> None:
    write_layout(tmp_path, layout, MODEL)
    config = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config.replace(f'"r": {RANK}', f'"r": {rank}'))
    refusal(tmp_path, MODEL)
    refusal(tmp_path, MODEL, max_rank=2 * rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_key(tmp_path: Path, layout: str, value: float) -> None:
    tensors = tensors_of(layout, 1, draw(layout, SPEC))
    key = sorted(tensors)[-1]
    tensors[key].view(-1)[-1] = value
    error = refusal(write_folder(tmp_path, tensors, **config_of(layout)), MODEL)
    assert (error.key, error.expected) == (key, "finite numbers")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_key(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    tensors = tensors_of(layout, 1, draw(layout, SPEC))
    key = sorted(tensors)[0]
    tensors[key] = tensors[key].to(dtype)
    error = refusal(write_folder(tmp_path, tensors, **config_of(layout)), MODEL)
    assert (error.key, error.expected) == (key, "dtype F32, F16 or BF16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_half_is_refused(tmp_path: Path, layout: str) -> None:
    tensors = tensors_of(layout, 2, draw(layout, SPEC))
    missing = sorted(tensors)[0]
    del tensors[missing]
    error = refusal(write_folder(tmp_path, tensors, **config_of(layout)), MODEL)
    assert error.key == missing.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("per_expert", "stacked"),
        ("stacked", "fused_per_expert"),
        ("packed", "per_expert"),
        ("stacked_fused", "stacked"),
    ],
)
def test_two_layouts_of_one_projection_are_refused(tmp_path: Path, first: str, second: str) -> None:
    tensors = tensors_of(first, 1, draw(first, SPEC))
    gate_and_up = {name: lora for name, lora in draw(second, SPEC).items() if name != "down"}
    tensors |= {key: value for key, value in tensors_of(second, 1, gate_and_up).items() if key not in tensors}
    error = refusal(write_folder(tmp_path, tensors, **config_of(first)), MODEL)
    assert (error.expected, error.found) == ("one layout for gate of layer 1", "two")


def test_stacks_that_are_flat_are_refused(tmp_path: Path) -> None:
    """A 2-D tensor under a stacked name could be packed either way."""
    flat = {f"{EXPERTS_OF_1}.down_proj.lora_A.weight": torch.ones(RANK * EXPERTS, WIDTH)}
    flat |= {f"{EXPERTS_OF_1}.down_proj.lora_B.weight": torch.ones(HIDDEN, RANK * EXPERTS)}
    error = refusal(write_folder(tmp_path, flat), MODEL)
    assert error.expected.startswith(f"shape [1, {RANK}, {WIDTH}] or [{EXPERTS}, {RANK}, {WIDTH}]")


def test_a_of_twice_the_rank_of_b_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("stacked_fused", 1, draw("stacked_fused", SPEC))
    key = f"{EXPERTS_OF_1}.gate_up_proj.lora_A.weight"
    tensors[key] = torch.cat([tensors[key]] * 2, dim=1)
    assert refusal(write_folder(tmp_path, tensors), MODEL).key == key


@pytest.mark.parametrize("targets", [None, [], ["q_proj"], ["model.layers.2.mlp.experts.down_proj"]])
def test_a_wrapped_parameter_that_the_configuration_does_not_name_is_refused(
    tmp_path: Path, targets: list[str] | None
) -> None:
    tensors = tensors_of("packed", 1, {"down": draw("packed", SPEC)["down"]})
    error = refusal(write_folder(tmp_path, tensors, target_parameters=targets), MODEL)
    assert error.key == f"{EXPERTS_OF_1}.lora_A.weight"
    assert "target_parameters" in error.expected


@pytest.mark.parametrize("layout", ["packed", "packed_swapped"])
@pytest.mark.parametrize(("kept", "named"), [("down", "gate_up_proj"), ("gate_up", "down_proj")])
def test_shapes_must_confirm_the_parameter_that_the_configuration_names(
    tmp_path: Path, layout: str, kept: str, named: str
) -> None:
    loras = {name: lora for name, lora in draw(layout, SPEC).items() if (name == "down") == (kept == "down")}
    write_folder(tmp_path, tensors_of(layout, 1, loras), target_parameters=[f"mlp.experts.{named}"])
    error = refusal(tmp_path, MODEL)
    assert error.key.startswith(f"{EXPERTS_OF_1}.lora_")
    assert error.expected.startswith("shape [")


def test_wrappers_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("packed", 1, draw("packed", SPEC))
    turned = {
        key.replace("base_layer.", "") if "base_layer" in key else key.replace("experts.", "experts.base_layer."): value
        for key, value in tensors.items()
    }
    assert refusal(write_folder(tmp_path, turned, **PACKED_CONFIG), MODEL).key.startswith(EXPERTS_OF_1)


def test_a_third_wrapper_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("packed", 1, draw("packed", SPEC))
    extra = {f"{EXPERTS_OF_1}.base_layer.base_layer.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    error = refusal(write_folder(tmp_path, tensors | extra, **PACKED_CONFIG), MODEL)
    assert "target_parameters" in error.expected


def test_b_grouped_by_expert_is_refused(tmp_path: Path) -> None:
    write_layout(tmp_path, "packed", MODEL, lora_B_layout="grouped_by_expert")
    assert refusal(tmp_path, MODEL).key == "lora_B_layout"


def test_a_truncated_adapter_is_refused(tmp_path: Path) -> None:
    write_layout(tmp_path, "per_expert", MODEL)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert refusal(tmp_path, MODEL).key == "adapter_model.safetensors"


def test_a_refused_adapter_leaves_the_next_one_alone(tmp_path: Path) -> None:
    drawn = write_layout(tmp_path / "good", "stacked", MODEL)
    write_layout(tmp_path / "bad", "stacked", MODEL, use_dora=True)
    before = load_adapter(tmp_path / "good", MODEL, max_rank=8)
    refusal(tmp_path / "bad", MODEL)
    after = load_adapter(tmp_path / "good", MODEL, max_rank=8)
    gate = [adapter.layers[1].gate for adapter in (before, after)]
    assert gate[0] is not None
    assert gate[1] is not None
    assert torch.equal(gate[0].a, gate[1].a)
    assert torch.equal(gate[0].a, drawn[1]["gate"].a)
