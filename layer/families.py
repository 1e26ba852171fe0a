"""The model families served, and how the ``config.json`` of each becomes sizes and routing."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedCheckpointError
from .spec import LayerSpec, RoutingMethod, RoutingSpec

Config = Mapping[str, Any]

MOST_LAYERS = 10_000
"""Bounds what a config.json that nobody vouches for can make us hold before a tensor is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the MoE blocks of one ``model_type`` have in common, and what they are called.

    ``renormalize``    None: ``norm_topk_prob`` of config.json decides, ``renormalize_default``
                       (that of the class in ``transformers``) where it is absent
    ``width``          the config field that holds an expert's width I
    ``shared_width``   the config field that holds the shared expert's width, None if there is none
    ``shared_count``   or the field that holds how many shared experts of width I there are
    ``dense``          which config fields say that some layers are dense: ``"step"`` (Qwen),
                       ``"first_k"`` (DeepSeek), or None where every layer is a MoE layer
    ``blocks``         names of the MoE block under ``layers.{i}.``, any of which may occur
    ``projections``    gate, up and down of a per-expert checkpoint
    ``shared_name``    the shared expert's name under the block
    """

    method: RoutingMethod = RoutingMethod.SOFTMAX_TOPK
    renormalize: bool | None = None
    renormalize_default: bool = False
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    shared_count: str | None = None
    dense: str | None = None
    blocks: tuple[str, ...] = ("mlp",)
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "shared_expert"

    @property
    def is_sigmoid(self) -> bool:
        """Whether experts are chosen by sigmoid scores with a correction bias."""
        return self.method is RoutingMethod.SIGMOID_GROUPED

    @property
    def shared_gated(self) -> bool:
        """Whether a sigmoid gate scales the shared expert (Qwen's does)."""
        return self.shared_width is not None


_QWEN35 = Family(renormalize=True, shared_width="shared_expert_intermediate_size")
_DEEPSEEK = Family(
    method=RoutingMethod.SIGMOID_GROUPED, shared_count="n_shared_experts", dense="first_k", shared_name="shared_experts"
)

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "mixtral": Family(
        renormalize=True,
        width="intermediate_size",
        blocks=("block_sparse_moe", "mlp"),
        projections=("w1", "w3", "w2"),
    ),
    "olmoe": Family(width="intermediate_size"),
    "qwen2_moe": Family(shared_width="shared_expert_intermediate_size", dense="step"),
    "qwen3_moe": Family(dense="step"),
    "qwen3_next": Family(renormalize_default=True, shared_width="shared_expert_intermediate_size", dense="step"),
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
}

SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Model types that are another of them under a name that transformers does not know."""

_WHY_NOT: Mapping[str, str] = {
    "deepseek_v2": "it scores expert groups by their maximum",
    "gpt_oss": "its router and experts have biases and its activation is clamped",
    "llama4": "it scales the input of an expert instead of its output",
    "phimoe": "it chooses experts one after another from jittered logits",
}


def family_of(config: Config) -> Family:
    """The family that ``model_type`` names. Raises ``UnsupportedCheckpointError`` for any other."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        why = f" ({_WHY_NOT[model_type]})" if model_type in _WHY_NOT else ""
        raise UnsupportedCheckpointError(
            f"model_type {model_type} in config.json is not supported{why}; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def check_config(config: Config, family: Family) -> None:
    """Refuse what would change the maths: quantised weights, another activation or scoring rule."""
    for field in ("quantization_config", "compression_config"):
        if quantization := config.get(field):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise UnsupportedCheckpointError(
                f"the checkpoint is quantised ({field}: {method or 'no quant_method named'}); "
                "only bf16, fp16 and fp32 weights are served"
            )
    wanted: dict[str, tuple[str, ...]] = {"hidden_act": ("silu", "swish")}
    if family.is_sigmoid:
        wanted |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    for field, accepted in wanted.items():
        if config.get(field, accepted[0]) not in accepted:
            raise UnsupportedCheckpointError(
                f"{field} in config.json is {config[field]!r}, only {accepted[0]!r} is supported"
            )


def layer_specs(config: Config, family: Family) -> Iterator[LayerSpec | str]:
    """For each of the ``num_hidden_layers`` layers its spec, or why it is not a MoE layer."""
    routing = _routing(config, family)
    width = _integer(config, family.width)
    sizes = {
        "hidden_size": _integer(config, "hidden_size"),
        "intermediate_size": width,
        "num_experts": _integer(config, "num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": _integer(config, "num_experts_per_tok"),
        "shared_intermediate_size": _shared_width(config, family, width),
    }
    for index in range(_num_layers(config)):
        dense = _why_dense(config, family, index)
        yield dense or LayerSpec(index=index, routing=routing, shared_gated=family.shared_gated, **sizes)


def config_notes(config: Config, family: Family) -> Iterator[str]:
    """What was assumed because config.json does not say it, one sentence each."""
    if family.renormalize is None and not family.is_sigmoid and config.get("norm_topk_prob") is None:
        yield (
            f"config.json has no norm_topk_prob: {family.renormalize_default} is assumed, "
            "the default of this family in transformers."
        )


def _routing(config: Config, family: Family) -> RoutingSpec:
    renormalize = family.renormalize
    if renormalize is None:
        renormalize = _flag(config, "norm_topk_prob", None if family.is_sigmoid else family.renormalize_default)
    if not family.is_sigmoid:
        return RoutingSpec(method=family.method, renormalize=renormalize)
    return RoutingSpec(
        method=family.method,
        renormalize=renormalize,
        num_groups=_integer(config, "n_group"),
        topk_groups=_integer(config, "topk_group"),
        has_correction_bias=True,
        routed_scaling_factor=_number(config, "routed_scaling_factor"),
    )


def _shared_width(config: Config, family: Family, width: int) -> int:
    if family.shared_width is not None:
        return _integer(config, family.shared_width, default=0)
    if family.shared_count is not None:
        return _integer(config, family.shared_count, default=0) * width
    return 0


def _why_dense(config: Config, family: Family, index: int) -> str:
    """The reason why layer ``index`` is dense, empty for a MoE layer."""
    if family.dense == "first_k":
        first = _integer(config, "first_k_dense_replace")
        every = max(_integer(config, "moe_layer_freq", default=1), 1)
        if index < first:
            return f"it is dense (first_k_dense_replace is {first})"
        if index % every:
            return f"it is dense (moe_layer_freq is {every})"
    if family.dense == "step":
        step = max(_integer(config, "decoder_sparse_step", default=1), 1)
        if index in _indices(config, "mlp_only_layers"):
            return "it is dense (listed in mlp_only_layers)"
        if (index + 1) % step:
            return f"it is dense (decoder_sparse_step is {step})"
    return ""


def _num_layers(config: Config) -> int:
    count = _integer(config, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise UnsupportedCheckpointError(
            f"num_hidden_layers in config.json is {count}, and at most {MOST_LAYERS} are served"
        )
    return count


def _integer(config: Config, *names: str, default: int | None = None) -> int:
    """The integer under any of ``names``, which must agree; ``null`` counts as absent."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UnsupportedCheckpointError(f"{name} in config.json should be a whole number, found {value!r}")
    values = set(found.values())
    if len(values) > 1:
        raise UnsupportedCheckpointError(f"config.json contradicts itself: {found}")
    if values:
        return int(values.pop())
    if default is None:
        raise UnsupportedCheckpointError(f"config.json has no {' or '.join(names)}")
    return default


def _indices(config: Config, name: str) -> list[int]:
    """The list of layer numbers under ``name``, empty where it is absent."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise UnsupportedCheckpointError(f"{name} in config.json should be a list of layer numbers, found {value!r}")
    return value


def _number(config: Config, name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UnsupportedCheckpointError(f"{name} in config.json should be a finite number, found {value!r}")
    return float(value)


def _flag(config: Config, name: str, default: bool | None) -> bool:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedCheckpointError(f"{name} in config.json should be true or false, found {value!r}")
    return value
