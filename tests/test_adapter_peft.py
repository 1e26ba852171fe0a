"""Adapters saved by PEFT change the experts exactly as PEFT's own merge does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from adapters import assert_same_delta, delta_of
from checkpoints import EXPERTS, SHARED
from moelet.layer.adapter import Adapter
from moelet.layer.adapter_loading import load_adapter
from peft_adapters import Deltas, fused_model, linear_model, model_spec, routed_delta, save, save_again

MODEL = model_spec()
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def assert_same_as_merge(
    adapter: Adapter, deltas: Deltas, projections: tuple[str, ...] = ("gate", "up", "down")
) -> None:
    """Every expert of every served layer; what the adapter has not got, the merge has not changed either."""
    for layer in MODEL.layers:
        for projection in ("gate", "up", "down"):
            weights = getattr(adapter.layers.get(layer), projection, None)
            assert (weights is not None) == (projection in projections and layer in adapter.layers)
            for expert in range(EXPERTS):
                wanted = routed_delta(deltas, layer, projection, expert)
                if weights is None or weights.ranks[expert] == 0:
                    assert not wanted.any()
                else:
                    assert wanted.any() == (weights.scaling[expert] != 0)
                    assert_same_delta(delta_of(weights, expert), wanted)


def assert_every_tensor_is_told_of(folder: Path, adapter: Adapter, used: int) -> None:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert set(adapter.ignored_keys) <= keys
    assert len(keys) - len(adapter.ignored_keys) == used


LINEAR: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1},
    "rank 24": {"r": 24},
    "rslora": {"use_rslora": True},
    "alpha 0": {"lora_alpha": 0},
    "alpha is no integer": {"lora_alpha": 2.5},
    "rank by pattern": {"rank_pattern": {"gate_proj": 5, r".*\.1\.mlp\.experts\.[02]\.down_proj": 1, "down_proj": 2}},
    "alpha by pattern": {"alpha_pattern": {r"experts\.\d+\.up_proj": 1, "up_proj": 100}},
    "one expert by pattern": {
        "rank_pattern": {"model.layers.2.mlp.experts.3.up_proj": 7},
        "alpha_pattern": {"up_proj": 9},
    },
    "only down": {"target_modules": ["down_proj"]},
    "only gate": {"target_modules": ["gate_proj"]},
    "one expert": {"target_modules": r"model\.layers\.\d+\.mlp\.experts\.5\.(gate|up|down)_proj"},
    "one layer": {"target_modules": r"model\.layers\.2\.mlp\.experts\.\d+\.(gate|up|down)_proj"},
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_experts(tmp_path: Path, case: str) -> None:
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["gate_proj", "up_proj", "down_proj"]} | LINEAR[case]
    deltas = save(linear_model(), tmp_path, **settings)
    adapter = load_adapter(tmp_path, MODEL, max_rank=24)
    only = {"only down": ("down",), "only gate": ("gate",)}
    assert_same_as_merge(adapter, deltas, only.get(case, ("gate", "up", "down")))
    assert set(adapter.layers) == ({2} if case == "one layer" else {1, 2})


def test_mixtral_names(tmp_path: Path) -> None:
    deltas = save(
        linear_model("block_sparse_moe", ("w1", "w3", "w2")), tmp_path, r=3, target_modules=["w1", "w2", "w3"]
    )
    renamed = {
        name.replace("block_sparse_moe", "mlp").replace(old, new): delta
        for name, delta in deltas.items()
        for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
        if old in name
    }
    assert_same_as_merge(load_adapter(tmp_path, MODEL, max_rank=8), renamed)


def test_attention_and_head_are_ignored_by_name(tmp_path: Path) -> None:
    deltas = save(linear_model(), tmp_path, r=3, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    assert_same_as_merge(adapter, deltas, ("up",))
    assert_every_tensor_is_told_of(tmp_path, adapter, used=2 * 2 * EXPERTS)
    ignored = set(adapter.ignored_keys)
    assert "base_model.model.lm_head.weight" in ignored
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in ignored
    assert "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_B.weight" in ignored


FUSED: dict[str, dict[str, Any]] = {
    "both": {},
    "rank 1": {"r": 1},
    "rslora": {"use_rslora": True},
    "alpha 0": {"lora_alpha": 0},
    "with attention": {"target_modules": ["q_proj"]},
    "patterns": {"rank_pattern": {"experts.gate_up_proj": 5}, "alpha_pattern": {r"layers\.1\..*down_proj": 31}},
    "only gate_up": {"target_parameters": BOTH[:1]},
    "only down": {"target_parameters": BOTH[1:]},
    "named the other way round": {"target_parameters": BOTH[::-1]},
}


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_wrapped_parameters(tmp_path: Path, model_type: str, case: str) -> None:
    settings = {"r": 3, "lora_alpha": 7, "target_modules": [], "target_parameters": BOTH} | FUSED[case]
    deltas = save(fused_model(model_type), tmp_path, **settings)
    adapter = load_adapter(tmp_path, MODEL, max_rank=8)
    only = {"only gate_up": ("gate", "up"), "only down": ("down",)}
    assert_same_as_merge(adapter, deltas, only.get(case, ("gate", "up", "down")))
    assert_every_tensor_is_told_of(tmp_path, adapter, used=2 * 2 * (1 if case in only else 2))


def test_shared_experts_beside_wrapped_parameters(tmp_path: Path) -> None:
    model = model_spec(SHARED)
    modules = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
    deltas = save(
        fused_model("qwen2_moe"),
        tmp_path,
        r=3,
        target_modules=modules,
        target_parameters=BOTH,
    )
    adapter = load_adapter(tmp_path, model, max_rank=8)
    for projection in ("gate", "up", "down"):
        wanted = deltas[f"model.layers.2.mlp.shared_expert.{projection}_proj.weight"]
        assert wanted.any()
        assert_same_delta(delta_of(getattr(adapter.layers[2], f"shared_{projection}"), 0), wanted)
        assert_same_delta(delta_of(getattr(adapter.layers[2], projection), 4), routed_delta(deltas, 2, projection, 4))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_an_old_adapter_that_newer_peft_saved_again(tmp_path: Path, model_type: str) -> None:
    names = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    save(linear_model(block, names), tmp_path / "old", r=3, lora_alpha=7, target_modules=list(names))
    deltas = save_again(fused_model(model_type), tmp_path / "old", tmp_path / "new")
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 6}

    old, new = (load_adapter(tmp_path / name, MODEL, max_rank=3) for name in ("old", "new"))
    assert_same_as_merge(old, deltas)
    assert_same_as_merge(new, deltas)
    assert new.max_rank == 3


def test_old_rslora_adapters_follow_the_formula_and_not_the_conversion(tmp_path: Path) -> None:
    """PEFT scales gate and up of a converted rslora adapter by a stray sqrt(2)."""
    modules = ["gate_proj", "up_proj", "down_proj"]
    before = save(linear_model(), tmp_path / "old", r=3, lora_alpha=6, use_rslora=True, target_modules=modules)
    converted = save_again(fused_model("qwen3_moe"), tmp_path / "old", tmp_path / "new")
    old = load_adapter(tmp_path / "old", MODEL, max_rank=8)
    assert_same_as_merge(old, before)
    gate = old.layers[1].gate
    assert gate is not None
    assert_same_delta(2**0.5 * delta_of(gate, 0), routed_delta(converted, 1, "gate", 0))
    assert gate.scaling[0].item() == pytest.approx(6 / 3**0.5)


def test_an_untrained_adapter_changes_nothing(tmp_path: Path) -> None:
    get_peft_model(linear_model(), LoraConfig(r=3, target_modules=["up_proj"])).save_pretrained(str(tmp_path))
    up = load_adapter(tmp_path, MODEL, max_rank=8).layers[1].up
    assert up is not None
    assert up.a.any()
    assert not delta_of(up, 0).any()
    assert torch.equal(up.ranks, torch.full((EXPERTS,), 3, dtype=torch.int32))
