"""What an ``adapter_config.json`` says, once every field that could change the maths is understood."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .adapter_files import CONFIG
from .adapter_json import parse_object, shown
from .adapter_patterns import Patterns
from .errors import AdapterRefusedError

_UNDERSTOOD = {
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_B_layout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_parameters",
    "use_rslora",
}
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
    "velora_config",
}
"""What does not change the maths of a forward: which modules have LoRA, the tensors' keys tell."""

_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""``init_lora_weights`` that leave the base weights alone; PiSSA, OLoRA, CorDA, LoftQ and the like change them."""

_MOE_MODULES = {
    *("mlp", "block_sparse_moe", "experts", "gate", "router"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"),
    *("shared_expert", "shared_experts", "shared_expert_gate"),
}
_LARGEST_SCALING = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Ranks and scalings of an adapter's modules, and which expert parameters it targets."""

    rank: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    target_parameters: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """r of ``module`` (its name without ``base_model.model.``), after ``rank_pattern``."""
        rank = self.rank_pattern.find(module)
        return self.rank if rank is None else rank

    def scaling_of(self, module: str) -> float:
        """alpha/r of ``module``, or alpha/sqrt(r) with ``use_rslora``, by its own r and alpha.

        Raises ``AdapterRefusedError`` if that is beyond fp32.
        """
        alpha = self.alpha_pattern.find(module)
        return self._scaling(self.lora_alpha if alpha is None else alpha, self.rank_of(module))

    @property
    def scaling(self) -> float:
        """The scaling of modules that no pattern names."""
        return self._scaling(self.lora_alpha, self.rank)

    def targets(self, parameter: str) -> bool:
        """Whether ``target_parameters`` names ``parameter``, in full or by its last parts."""
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.target_parameters)

    def _scaling(self, alpha: float, rank: int) -> float:
        scaling = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        if abs(scaling) > _LARGEST_SCALING:
            raise AdapterRefusedError("lora_alpha", "a scaling within fp32", f"{scaling}")
        return scaling


def read_adapter_config(content: bytes) -> AdapterConfig:
    """The configuration in ``content``, the bytes of ``adapter_config.json``.

    Raises ``AdapterRefusedError`` naming the field that is missing, malformed, changes the maths in a
    way that is not served, or is unknown and set.
    """
    fields = parse_object(CONFIG, content)
    _expect(fields, "peft_type", ("LORA",))
    for name in sorted(fields.keys() - _UNDERSTOOD - _HARMLESS):
        if fields[name]:
            raise AdapterRefusedError(name, "a field that is absent, null or false", shown(fields[name]))
    _expect(fields, "bias", (None, "none"))
    _expect(fields, "lora_B_layout", (None, "rank_major"))
    _expect(fields, "init_lora_weights", _PLAIN_STARTS)
    _expect(fields, "use_rslora", (None, True, False))
    _check_modules_to_save(fields)
    return AdapterConfig(
        rank=_rank("r", fields.get("r")),
        lora_alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        use_rslora=bool(fields.get("use_rslora")),
        rank_pattern=Patterns("rank_pattern", {k: _rank("rank_pattern", v) for k, v in _table(fields, "rank_pattern")}),
        alpha_pattern=Patterns(
            "alpha_pattern", {k: _alpha("alpha_pattern", v) for k, v in _table(fields, "alpha_pattern")}
        ),
        target_parameters=tuple(_names(fields, "target_parameters")),
    )


def _expect(fields: Mapping[str, Any], name: str, accepted: tuple[object, ...]) -> None:
    value = fields.get(name)
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in accepted):
        wanted = " or ".join("null" if choice is None else repr(choice) for choice in accepted)
        raise AdapterRefusedError(name, wanted, shown(value))


def _rank(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise AdapterRefusedError(name, "a rank, a whole number of at least 1", shown(value))
    return value


def _alpha(name: str, value: object) -> float:
    if type(value) in (int, float):
        try:
            alpha = float(value)  # type: ignore[arg-type]
        except OverflowError:
            alpha = math.inf
        if math.isfinite(alpha):
            return alpha
    raise AdapterRefusedError(name, "a finite number", shown(value))


def _table(fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterRefusedError(name, "an object of module names and values", shown(value))
    return list(value.items())


def _names(fields: Mapping[str, Any], name: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise AdapterRefusedError(name, "a list of names", shown(value))
    return value


def _check_modules_to_save(fields: Mapping[str, Any]) -> None:
    """Whole modules may come with an adapter (``lm_head``), but none of a MoE block."""
    for module in _names(fields, "modules_to_save"):
        if module.rpartition(".")[2] in _MOE_MODULES:
            raise AdapterRefusedError("modules_to_save", "no module of a MoE block", shown(module))
