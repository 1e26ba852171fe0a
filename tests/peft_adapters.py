"""Adapters trained-and-saved by PEFT itself, beside the weights' change that its own merge makes."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from adapters import moe_model
from checkpoints import EXPERTS, HIDDEN, LAYERS, WIDTH, build_model
from moelet.layer.spec import ModelSpec

Deltas = dict[str, Tensor]
"""What a merge adds to each parameter, in float64, by the parameter's name."""


def model_spec(shared: int = 0) -> ModelSpec:
    """What is served of the models below: layers 1 and 2; 0 is dense, 3 left out."""
    return moe_model(hidden=HIDDEN, width=WIDTH, experts=EXPERTS, shared=shared)


def fused_model(model_type: str, *, layers: int = LAYERS) -> nn.Module:
    """A model of transformers, experts as 3-D parameters, in fp32."""
    return build_model(model_type, num_hidden_layers=layers).float()


def linear_model(block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> nn.Module:
    """Experts as linear modules under the names that transformers 4 gave them, in fp32."""
    torch.manual_seed(0)
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        experts = nn.ModuleList()
        for _ in range(EXPERTS):
            sizes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
            experts.append(_tree({name: nn.Linear(*size, bias=False) for name, size in zip(names, sizes, strict=True)}))
        moe = _tree({"gate": nn.Linear(HIDDEN, EXPERTS, bias=False), "experts": experts})
        attention = _tree({"q_proj": nn.Linear(HIDDEN, HIDDEN, bias=False)})
        layers.append(_tree({"self_attn": attention, block: moe}))
    return _tree({"model": _tree({"layers": layers}), "lm_head": nn.Linear(HIDDEN, 7, bias=False)})


def save(model: nn.Module, folder: Path, **settings: Any) -> Deltas:
    """Put LoRA with random A and B (bf16 values, stored as fp32) on ``model``, save it, merge it."""
    with warnings.catch_warnings():
        # PEFT warns of patterns for parameters, which it applies, and of rslora beside patterns.
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(**settings))
        _randomise(wrapped)
        wrapped.save_pretrained(str(folder))
        return merge(wrapped)


def save_again(model: nn.Module, folder: Path, new_folder: Path) -> Deltas:
    """Load the adapter in ``folder`` onto ``model`` with PEFT and save it to ``new_folder``; its merge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = PeftModel.from_pretrained(model, str(folder))
        wrapped.save_pretrained(str(new_folder))
        return merge(wrapped)


def merge(wrapped: PeftModel) -> Deltas:
    """``merge_and_unload`` minus what was there, of everything in the layers, in float64."""
    wrapped.double()
    before = {_plain(name): value.detach().clone() for name, value in wrapped.named_parameters()}
    merged = wrapped.merge_and_unload()
    return {name: value.detach() - before[name] for name, value in merged.named_parameters() if "layers." in name}


def routed_delta(deltas: Deltas, layer: int, projection: str, expert: int) -> Tensor:
    """The change of one expert's ``[out, in]``, whether the model has linear or 3-D experts."""
    width = WIDTH
    experts = f"model.layers.{layer}.mlp.experts."
    if f"{experts}{expert}.{projection}_proj.weight" in deltas:
        return deltas[f"{experts}{expert}.{projection}_proj.weight"]
    if projection == "down":
        return deltas[f"{experts}down_proj"][expert]
    gate_up = deltas[f"{experts}gate_up_proj"][expert]
    return gate_up[:width] if projection == "gate" else gate_up[width:]


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _tree(children: dict[str, nn.Module]) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _randomise(wrapped: nn.Module) -> None:
    seeded = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=seeded).bfloat16())
