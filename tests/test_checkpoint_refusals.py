"""Checkpoints that cannot be served: each refusal's class and sentence."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import copy_checkpoint, fuse_experts, update_config, write_checkpoint
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.errors import CheckpointNotFoundError
from moelet.layer.errors import UnsupportedCheckpointError as Unsupported

Tensors = dict[str, Tensor]
EXPERT = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pristine qwen3_moe checkpoint: tests copy it before they spoil it."""
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(directory, "qwen3_moe")
    return directory


@pytest.fixture
def edited(qwen3: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the pristine checkpoint with config fields or tensors changed."""
    return partial(copy_checkpoint, qwen3, tmp_path / "edited")


@pytest.mark.parametrize(("field", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy")])
def test_another_way_of_choosing_experts_is_refused(field: str, value: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3")
    update_config(tmp_path, **{field: value})
    with pytest.raises(Unsupported, match=f"{field} in config.json is '{value}'"):
        open_checkpoint(tmp_path)


def test_fused_experts_that_contradict_each_other_are_refused(edited: Callable[..., Path]) -> None:
    directory = edited(tensors=lambda t: fuse_experts(t, 0, transpose_gate_up=True))
    with pytest.raises(Unsupported, match=r"orientation of the fused experts is ambiguous.*\[8, 40, 48\]"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v2", "minimax_m2", "phimoe", "gpt_oss", "llama4", "qwen3_vl_moe", "llama", None]
)
def test_other_families_are_refused_by_name(model_type: str | None, edited: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match=rf"model_type {model_type} .*supported are deepseek_v3, .*qwen3_moe"):
        open_checkpoint(edited({"model_type": model_type}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(quantization_config: fp8\)"),
        ({"quantization_config": {"bits": 4}}, "no quant_method named"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu', only 'silu'"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_local_experts": None}, "no num_experts or num_local_experts or n_routed_experts"),
        ({"num_experts": 9}, "contradicts itself.*9"),
        ({"hidden_size": "40"}, "hidden_size .* should be a whole number, found '40'"),
        ({"num_experts_per_tok": True}, "should be a whole number, found True"),
        ({"num_experts_per_tok": 9}, "top_k is 9 but there are only 8 experts"),
        ({"num_local_experts": 7}, r"mlp.gate.weight should have shape \[7, 40\] by config.json, found \[8, 40\]"),
        ({"moe_intermediate_size": 25}, r"should have shape \[25, 40\] .* found \[24, 40\]"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob in config.json should be true or false, found 'yes'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000, and at most 10000"),
        ({"num_hidden_layers": 4}, "layer 3 should be a MoE layer, but there is no tensor model.layers.3.mlp.gate"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 56}, "has no tensor .*shared_expert.gate_proj"),
        ({"mlp_only_layers": 1}, "mlp_only_layers in config.json should be a list of layer numbers, found 1"),
        ({"num_local_experts": 10**12}, r"mlp.gate.weight should have shape \[1000000000000, 40\]"),
        ({"text_config": 3}, "text_config in config.json should be an object, found 3"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    fields: dict[str, Any], message: str, edited: Callable[..., Path]
) -> None:
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(edited(fields))


def replaced(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: change(tensors[key]).contiguous()})


def added(key: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}3.up_proj.weight"), "has no tensor .*experts.3.up_proj.weight, expected .*24, 40"),
        (replaced(f"{EXPERT}3.up_proj.weight", lambda t: t.T), r"should have shape \[24, 40\] .* found \[40, 24\]"),
        (added(f"{EXPERT}8.up_proj.weight", torch.ones(24, 40)), "experts.8.up_proj.weight is not a tensor"),
        (added(f"{EXPERT}1.up_proj.bias", torch.ones(24)), "experts.1.up_proj.bias is not a tensor"),
        (added("model.layers.1.mlp.gate.bias", torch.ones(8)), "layer 1: model.layers.1.mlp.gate.bias is not"),
        (added(f"{EXPERT}1.up_proj.weight_scale_inv", torch.ones(1)), "quantised: .*weight_scale_inv is F32"),
        (added(f"{EXPERT}gate_up_proj_blocks", torch.ones(8, dtype=torch.uint8)), "quantised: .*_blocks is U8"),
        (replaced(f"{EXPERT}1.up_proj.weight", lambda t: t.to(torch.float8_e4m3fn)), "quantised: .* is F8_E4M3"),
        (replaced(f"{EXPERT}1.up_proj.weight", lambda t: t.to(torch.int8)), "quantised: .* is I8"),
        (lambda t: t.pop("model.layers.2.mlp.gate.weight"), "layer 2 should be a MoE layer"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused(
    change: Callable[[Tensors], None], message: str, edited: Callable[..., Path]
) -> None:
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(edited(tensors=change))


def test_a_fused_tensor_without_its_sibling_is_refused(edited: Callable[..., Path]) -> None:
    def spoil(tensors: Tensors) -> None:
        fuse_experts(tensors, 0)
        tensors.pop(f"{EXPERT}down_proj")

    with pytest.raises(Unsupported, match=r"has no tensor .*experts.down_proj, expected one of shape \[8, 40, 24\]"):
        open_checkpoint(edited(tensors=spoil))


def test_what_is_not_there_is_said_to_be_not_there(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="is not a folder"):
        open_checkpoint(qwen3 / "config.json")
    with pytest.raises(CheckpointNotFoundError, match=r"has no config.json"):
        open_checkpoint(tmp_path)
    shutil.copy(qwen3 / "config.json", tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index"):
        open_checkpoint(tmp_path)
    shutil.copy(qwen3 / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"holds model-00001-of-00002.safetensors but neither"):
        open_checkpoint(tmp_path)


def test_what_cannot_be_looked_at_is_said_to_be_so(qwen3: Path, tmp_path: Path) -> None:
    """A name too long stands for every reason, a folder that others may not enter being the common one."""
    with pytest.raises(CheckpointNotFoundError, match="cannot be looked at: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))
    shutil.copy(qwen3 / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"model.safetensors cannot be looked at: Too many levels"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nothing_is_said_to_be_one(name: str, qwen3: Path, tmp_path: Path) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError, match=f"{name} is no file, or a link to a file that is not there"):
        open_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointNotFoundError, match=f"{name} is no file"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_way_to_convert_them(qwen3: Path, tmp_path: Path) -> None:
    shutil.copy(qwen3 / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(Unsupported, match=r"holds pytorch_model.bin but no safetensors.*save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_a_broken_config_is_refused(content: bytes, edited: Callable[..., Path]) -> None:
    directory = edited()
    (directory / "config.json").write_bytes(content)
    with pytest.raises(Unsupported, match=r"config.json (is not valid JSON|should hold a JSON object)"):
        open_checkpoint(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_safetensors_are_refused(keep: int, edited: Callable[..., Path]) -> None:
    path = edited() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Unsupported, match=r"model.safetensors is not a whole safetensors file"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "expected a file beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "expected a file beside it"),
        ('{"weight_map": {"a": 3}}', "names 3, expected a file beside it"),
        ('{"weight_map": {"a": ["model.safetensors"]}}', "expected a file beside it"),
        ('{"weight_map": {"a": {}}}', "expected a file beside it"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_broken_index_is_refused(index: str, message: str, edited: Callable[..., Path]) -> None:
    directory = edited()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(directory)


def test_an_index_that_promises_too_much_is_refused(edited: Callable[..., Path]) -> None:
    directory = edited()
    keys = dict.fromkeys(load_file(directory / "model.safetensors"), "renamed.safetensors")
    (directory / "model.safetensors").rename(directory / "renamed.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": keys}))
    assert list(open_checkpoint(directory).model.layers) == [0, 1, 2]
    index.write_text(json.dumps({"weight_map": keys | {f"{EXPERT}0.up_proj.scale": "renamed.safetensors"}}))
    with pytest.raises(Unsupported, match=r"renamed.safetensors has no tensor .*up_proj.scale"):
        open_checkpoint(directory)
