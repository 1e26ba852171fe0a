"""Small random checkpoints of every family, written by transformers itself, for the tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

HIDDEN, WIDTH, SHARED, DENSE, EXPERTS, TOP_K, LAYERS = 40, 24, 56, 72, 8, 3, 3

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "_experts_implementation": "eager",
}
_QWEN: dict[str, Any] = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "intermediate_size": DENSE}
_LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": DENSE,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _QWEN | {"shared_expert_intermediate_size": SHARED, "mlp_only_layers": [1]},
    "qwen3_moe": _QWEN | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen3_next": _QWEN | _LINEAR | {"shared_expert_intermediate_size": SHARED},
    "qwen3_5_moe": _QWEN | _LINEAR | {"shared_expert_intermediate_size": SHARED},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": WIDTH},
    "deepseek_v3": _DEEPSEEK | _LATENT,
    "glm4_moe": _DEEPSEEK | {"n_group": 1, "topk_group": 1, "head_dim": 8},
}
"""The families under test and what their configs hold beside the sizes that all share."""


def build_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of ``model_type`` in bf16 (routers of DeepSeek and GLM fp32) with random weights.

    Expert weights have the scale of trained ones, routers enough spread that experts differ.
    """
    settings = _COMMON | FAMILY_CONFIGS[model_type] | overrides
    if model_type == "qwen3_5_moe":
        model = _composite(settings)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.bfloat16)
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def write_checkpoint(
    directory: Path,
    model_type: str,
    *,
    seed: int = 0,
    hub_names: bool = True,
    max_shard_size: str = "1GB",
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """``build_model`` and save it under ``directory``; returns the model.

    ``hub_names`` False writes the fused 3-D experts that transformers keeps in memory instead of
    the per-expert keys of the hub.
    """
    model = build_model(model_type, seed=seed, **overrides)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(directory, save_original_format=hub_names, max_shard_size=max_shard_size)
    return model


def copy_checkpoint(
    source: Path,
    directory: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, Tensor]], object] | None = None,
) -> Path:
    """Copy ``source`` to ``directory`` with config fields replaced and its tensors changed in place by ``tensors``."""
    shutil.copytree(source, directory)
    update_config(directory, **(config or {}))
    if tensors is not None:
        stored = load_file(directory / "model.safetensors")
        tensors(stored)
        save_file(stored, directory / "model.safetensors")
    return directory


def update_config(directory: Path, **fields: Any) -> None:
    """Replace fields of ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def fuse_experts(
    tensors: dict[str, Tensor], layer: int, *, transpose_gate_up: bool = False, transpose_down: bool = False
) -> None:
    """Replace the per-expert tensors of ``layer`` with fused ones, in either orientation."""
    prefix = f"model.layers.{layer}.mlp.experts."
    parts = {
        name: torch.stack([tensors.pop(f"{prefix}{e}.{name}.weight") for e in range(EXPERTS)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
    down = parts["down_proj"]
    tensors[f"{prefix}gate_up_proj"] = (gate_up.mT if transpose_gate_up else gate_up).contiguous()
    tensors[f"{prefix}down_proj"] = (down.mT if transpose_down else down).contiguous()


def moe_block(model: PreTrainedModel, layer: int) -> nn.Module:
    """transformers' own MoE module of ``layer``."""
    backbone = model.model
    block: nn.Module = getattr(backbone, "language_model", backbone).layers[layer].mlp
    return block


def router_of(block: nn.Module) -> nn.Module:
    """The router inside transformers' MoE module; returns logits, weights, ids."""
    router: nn.Module = block.gate
    return router


def _composite(settings: dict[str, Any]) -> PreTrainedModel:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": HIDDEN}
    implementation = settings.pop("_experts_implementation")
    config = transformers.Qwen3_5MoeConfig(text_config=settings, vision_config=vision)
    config.text_config._experts_implementation = implementation
    return transformers.Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)


def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if not tensor.is_floating_point() or ".mlp." not in name:
            continue
        scale = 0.1 if name.endswith("e_score_correction_bias") else tensor.shape[-1] ** -0.5
        values = torch.randn(tensor.shape, generator=generator) * scale
        tensor.data.copy_(values * (4 if name.endswith(".gate.weight") else 1))
