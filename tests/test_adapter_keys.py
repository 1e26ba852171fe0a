"""Tensor keys under every prefix that is known, and the reasons for refusing or ignoring the others."""

from pathlib import Path

import pytest
import torch

from adapters import (
    EXPERTS,
    HIDDEN,
    PACKED_CONFIG,
    RANK,
    WIDTH,
    assert_adapter_is,
    draw,
    moe_model,
    refusal,
    tensors_of,
    write_folder,
)
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.errors import AdapterRefusedError

MODEL = moe_model()
SPEC = MODEL.layers[1]
A, B = torch.ones(RANK, HIDDEN), torch.ones(WIDTH, RANK)
GOOD = "base_model.model.model.layers.1.mlp.experts.0.up_proj"


def write(folder: Path, *modules: str, **others: torch.Tensor) -> Path:
    """An adapter on one good module and on ``modules``, all of the shapes of ``up_proj``."""
    tensors = {}
    for module in (GOOD, *modules):
        tensors |= {f"{module}.lora_A.weight": A.clone(), f"{module}.lora_B.weight": B.clone()}
    return write_folder(folder, tensors | others)


@pytest.mark.parametrize("head", ["base_model.model.", ""])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
@pytest.mark.parametrize("layout", ["per_expert", "mixtral", "stacked", "packed"])
def test_known_prefixes_lead_to_the_same_place(tmp_path: Path, head: str, prefix: str, layout: str) -> None:
    loras = draw(layout, SPEC)
    config = PACKED_CONFIG if layout == "packed" else {}
    write_folder(tmp_path, tensors_of(layout, 1, loras, prefix=head + prefix), **config)
    assert_adapter_is(load_adapter(tmp_path, MODEL, max_rank=8), {1: loras}, scaling=2.0)


def test_patterns_see_the_name_as_the_file_has_it(tmp_path: Path) -> None:
    loras = draw("per_expert", SPEC)
    tensors = tensors_of("per_expert", 1, loras, prefix="base_model.model.model.language_model.")
    pattern = {"^model.language_model.layers.1.mlp.experts.2.up_proj": 60}
    write_folder(tmp_path, tensors, alpha_pattern=pattern)
    up = load_adapter(tmp_path, MODEL, max_rank=8).layers[1].up
    assert up is not None
    assert up.scaling.tolist() == [2.0, 2.0, 20.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.1.input_layernorm.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.gate.lora_A.weight",
        "base_model.model.model.layers.0.mlp.gate.weight",
        "base_model.model.model.layers.3.mlp.experts.0.up_proj.lora_A.weight",
        "base_model.model.model.layers.3.mlp.experts.lora_A.weight",
        "base_model.model.model.layers.3.mlp.shared_expert_gate.lora_A.weight",
        "base_model.model.model.visual.blocks.1.mlp.up_proj.lora_A.weight",
        "base_model.model.vision_tower.layers.1.self_attn.q_proj.lora_A.weight",
    ],
)
def test_what_is_not_served_is_ignored_by_name(tmp_path: Path, key: str) -> None:
    # Not finite, and of a dtype that LoRA has not: nobody looks.
    write(tmp_path, **{key: torch.full((2,), float("nan"), dtype=torch.float64)})
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert adapter.ignored_keys == (key,)
    assert adapter.targets == ("up",)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("base_model.model.thinker.model.layers.1.mlp.experts.0.down_proj", "thinker.model"),
        ("model.model.layers.1.mlp.experts.1.up_proj", "model.model"),
        ("mtp.layers.1.mlp.experts.1.up_proj", "mtp"),
        ("base_model.model.model.layers.01.mlp.experts.1.up_proj", "starts with"),
        ("base_model.model.model.layers.1x.mlp.experts.1.up_proj", "starts with"),
        ("base_model.model.experts.1.up_proj", "starts with"),
        ("base_model.model.transformer.h.1.mlp.experts.1.up_proj", "starts with"),
        ("base_model.model.model.layers.4.mlp.experts.1.up_proj", "layer 4"),
        ("base_model.model.model.layers.99.self_attn.q_proj", "layer 99"),
        ("base_model.model.model.layers.1.moe.experts.1.up_proj", "under mlp or block_sparse_moe"),
        ("base_model.model.model.layers.1.mlp.gate", "router"),
        ("base_model.model.model.layers.1.block_sparse_moe.gate", "router"),
        ("base_model.model.model.layers.1.mlp.router", "router"),
        ("base_model.model.model.layers.1.mlp.shared_expert_gate", "shared expert's gate"),
        ("base_model.model.model.layers.1.mlp.shared_expert.up_proj", "shared experts"),
        ("base_model.model.model.layers.1.mlp.up_proj", "on up_proj"),
        ("base_model.model.model.layers.1.mlp", "another tensor"),
        ("base_model.model.model.layers.1.mlp.experts.1.w4", "on experts.1.w4"),
        ("base_model.model.model.layers.1.mlp.experts.up_projs.1", "on experts.up_projs.1"),
        ("base_model.model.model.layers.1.mlp.experts.1.up_proj.base_layer", "base_layer"),
        ("base_model.model.model.layers.1.mlp.experts.01.up_proj", "on experts.01"),
        (f"base_model.model.model.layers.1.mlp.experts.{EXPERTS}.up_proj", f"expert {EXPERTS}"),
    ],
)
def test_modules_that_cannot_be_placed_are_refused_by_key(tmp_path: Path, module: str, word: str) -> None:
    error = refusal(write(tmp_path, module), MODEL)
    assert error.key in (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    assert word in str(error)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (f"{GOOD}.lora_magnitude_vector", "DoRA's magnitudes"),
        (f"{GOOD}.lora_B.bias", "a bias"),
        (f"{GOOD}.weight", "another tensor of a MoE block"),
        (f"{GOOD}.lora_A.default.weight", "another tensor of a MoE block"),
        (f"{GOOD}.lora_C.weight", "another tensor of a MoE block"),
        ("base_model.model.model.layers.1.mlp.experts.gate_up_proj", "another tensor of a MoE block"),
        ("base_model.model.model.layers.1.mlp.gate.weight", "one"),
        ("base_model.model.model.layers.1.mlp.gate.e_score_correction_bias", "one"),
    ],
)
def test_other_tensors_of_a_moe_block_are_refused_by_key(tmp_path: Path, key: str, found: str) -> None:
    error = refusal(write(tmp_path, **{key: torch.ones(3)}), MODEL)
    assert (error.key, error.found) == (key, found)


@pytest.mark.parametrize("side", "AB")
def test_half_a_pair_is_refused(tmp_path: Path, side: str) -> None:
    module = "base_model.model.model.layers.2.mlp.experts.1.up_proj"
    error = refusal(write(tmp_path, **{f"{module}.lora_{side}.weight": A if side == "A" else B}), MODEL)
    assert error.key == f"{module}.lora_{side}.weight"
    assert f"beside this lora_{side}" in error.expected


@pytest.mark.parametrize(
    "again",
    [
        "model.layers.1.mlp.experts.0.up_proj",
        "base_model.model.model.layers.1.block_sparse_moe.experts.0.up_proj",
        "base_model.model.model.layers.1.mlp.experts.0.w3",
    ],
)
def test_one_module_under_two_names_is_refused(tmp_path: Path, again: str) -> None:
    error = refusal(write(tmp_path, again), MODEL)
    assert error.expected == "each LoRA once"


def test_a_and_b_under_different_names_are_refused(tmp_path: Path) -> None:
    module = "base_model.model.model.layers.2.mlp.experts.1"
    error = refusal(write(tmp_path, **{f"{module}.up_proj.lora_A.weight": A, f"{module}.w3.lora_B.weight": B}), MODEL)
    assert error.key == f"{module}.w3.lora_B.weight"


def test_an_adapter_of_which_nothing_is_served_is_refused(tmp_path: Path) -> None:
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B}
    tensors |= tensors_of("stacked", 3, draw("stacked", SPEC))
    error = refusal(write_folder(tmp_path, tensors), MODEL)
    assert error.key == "adapter_model.safetensors"
    assert "8 tensors belong to other modules" in error.found


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert refusal(write_folder(tmp_path, {}), MODEL).key == "adapter_model.safetensors"


def test_layers_left_out_are_ignored_and_the_others_served(tmp_path: Path) -> None:
    loras = {index: draw("packed", SPEC, seed=index) for index in (0, 1, 3)}
    tensors = {key: value for index in loras for key, value in tensors_of("packed", index, loras[index]).items()}
    write_folder(tmp_path, tensors, **PACKED_CONFIG)
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert_adapter_is(adapter, {1: loras[1]}, scaling=2.0)
    assert {key.split(".")[4] for key in adapter.ignored_keys} == {"0", "3"}
    assert len(adapter.ignored_keys) == 8


def test_the_error_says_key_expectation_and_finding() -> None:
    error = AdapterRefusedError("a.key", "this", "that")
    assert str(error) == "a.key: expected this, found that"
