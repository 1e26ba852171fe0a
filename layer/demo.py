"""Writes a small seeded checkpoint with two adapters: what is served when there is nothing else to serve."""

import filecmp
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from .errors import ConfigurationError

NAME = "moelet-demo"
ADAPTERS = ("demo-a", "demo-b")

_FILES = (
    *(f"{name}/{file}" for name in ADAPTERS for file in ("adapter_model.safetensors", "adapter_config.json")),
    "model.safetensors",
    "config.json",
)
_LAYERS, _EXPERTS, _TOP_K, _HIDDEN, _WIDTH, _VOCABULARY = 4, 8, 2, 64, 48, 256
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16

_PROJECTIONS: Mapping[str, tuple[int, int]] = {
    "gate_proj": (_WIDTH, _HIDDEN),
    "up_proj": (_WIDTH, _HIDDEN),
    "down_proj": (_HIDDEN, _WIDTH),
}

_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": 3 * _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPaths:
    """Where the demo lies: the checkpoint's folder, and the folder of each adapter by name."""

    checkpoint: Path
    adapters: Mapping[str, Path]


def write_demo(directory: Path) -> DemoPaths:
    """Make ``directory`` a Qwen3-MoE checkpoint (4 layers, E=8, top 2, H=64, I=48, bf16, under 5 MB).

    Beside its ``config.json`` lie the adapters ``demo-a`` (per expert, rank 8) and ``demo-b``
    (shared-outer, rank 4). The bytes are the same on every machine. A demo that is there whole is
    left alone; what is missing is written beside and renamed, configurations last, so that no
    reader finds half a checkpoint.
    Raises ``ConfigurationError`` if another file has one of its names, or nothing can be written.
    """
    try:
        if not all((directory / file).is_file() for file in _FILES):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".demo-", dir=directory) as draft:
                _write(Path(draft))
                _publish(Path(draft), directory)
    except OSError as error:
        raise ConfigurationError(
            f"the demo cannot be written to {directory} ({error.strerror}): name another folder"
        ) from error
    return DemoPaths(checkpoint=directory, adapters={name: directory / name for name in ADAPTERS})


def _publish(draft: Path, directory: Path) -> None:
    for file in _FILES:
        target = directory / file
        if target.exists() and not filecmp.cmp(draft / file, target, shallow=False):
            raise ConfigurationError(f"{target} is there and is not the demo's: name another folder for the demo")
    for file in _FILES:
        (directory / file).parent.mkdir(exist_ok=True)
        (draft / file).replace(directory / file)


def _write(folder: Path) -> None:
    random = _Random()
    _save(folder, "config.json", _CONFIG, "model.safetensors", _model(random))
    for name, rank, draw in zip(ADAPTERS, (8, 4), (_per_expert_adapter, _shared_outer_adapter), strict=True):
        (folder / name).mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": NAME,
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
            "bias": "none",
            "inference_mode": True,
        }
        _save(folder / name, "adapter_config.json", config, "adapter_model.safetensors", draw(random, rank))


def _save(folder: Path, config_name: str, config: Mapping[str, Any], weights_name: str, tensors: Any) -> None:
    (folder / config_name).write_text(json.dumps(config, indent=2) + "\n")
    (folder / weights_name).write_bytes(save(tensors, metadata={"format": "pt"}))


class _Random:
    """Uniform bf16 tensors, alike on every machine: a frozen generator's whole numbers times powers of two."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(20_251_129)

    def matrix(self, *shape: int) -> Tensor:
        """Values with about the scale that keeps ``x @ matrix.T`` as large as ``x``."""
        whole = self._state.randint(-127, 128, size=shape)
        scale = 2.0 ** -round(math.log2(shape[-1]) / 2 - 0.8)
        tensor: Tensor = torch.from_numpy(whole) * (scale / 128)
        return tensor.bfloat16()


def _model(random: _Random) -> dict[str, Tensor]:
    tensors = {
        "model.embed_tokens.weight": random.matrix(_VOCABULARY, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random.matrix(_VOCABULARY, _HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for norm, size in {
            "input_layernorm": _HIDDEN,
            "post_attention_layernorm": _HIDDEN,
            "self_attn.q_norm": _HEAD_DIM,
            "self_attn.k_norm": _HEAD_DIM,
        }.items():
            tensors[f"{prefix}{norm}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name, heads in {"q": _HEADS, "k": _KV_HEADS, "v": _KV_HEADS}.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = random.matrix(heads * _HEAD_DIM, _HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = random.matrix(_HIDDEN, _HEADS * _HEAD_DIM)
        tensors[f"{prefix}mlp.gate.weight"] = random.matrix(_EXPERTS, _HIDDEN)
        for expert in range(_EXPERTS):
            for name, (out_size, in_size) in _PROJECTIONS.items():
                tensors[f"{prefix}mlp.experts.{expert}.{name}.weight"] = random.matrix(out_size, in_size)
    return tensors


def _per_expert_adapter(random: _Random, rank: int) -> dict[str, Tensor]:
    tensors = {}
    for layer in range(_LAYERS):
        for expert in range(_EXPERTS):
            for name, (out_size, in_size) in _PROJECTIONS.items():
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = random.matrix(rank, in_size)
                tensors[f"{module}.lora_B.weight"] = random.matrix(out_size, rank)
    return tensors


def _shared_outer_adapter(random: _Random, rank: int) -> dict[str, Tensor]:
    """One A for all experts on gate and up, one B for all on down: the sides of width H."""
    tensors = {}
    for layer in range(_LAYERS):
        for name, (out_size, in_size) in _PROJECTIONS.items():
            module = f"base_model.model.model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{module}.lora_A.weight"] = random.matrix(1 if in_size == _HIDDEN else _EXPERTS, rank, in_size)
            tensors[f"{module}.lora_B.weight"] = random.matrix(1 if out_size == _HIDDEN else _EXPERTS, out_size, rank)
    return tensors
