"""Loads a checkpoint through transformers with no room for its experts: their tensors are never read."""

from collections.abc import Collection, Mapping
from os import PathLike, fspath
from typing import Any

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...layer.errors import UnsupportedCheckpointError
from ...layer.families import SAME_AS, family_of
from .remote_modules import local_parts, moe_blocks


class Absent(nn.Module):
    """Experts that were not loaded."""


def load_without_experts(
    path: str | PathLike[str], layers: Collection[int] | None, options: Mapping[str, Any]
) -> transformers.PreTrainedModel:
    """``from_pretrained(path, **options)``, the experts of ``layers`` (None: every MoE layer) left out.

    transformers makes the modules first and then reads what they have room for, so a subclass takes the experts
    away as soon as they are made. Raises ``UnsupportedCheckpointError`` for a family that is not served, or that
    transformers does not have.
    """
    config, options = _read_config(fspath(path), options)
    plain = _model_class(config)

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        for layer, block in moe_blocks(self):
            if layers is None or layer in layers:
                for part in local_parts(block):
                    setattr(block, part, Absent())

    ignored = [*(plain._keys_to_ignore_on_load_unexpected or ()), r"\.(experts|shared_experts?)\."]
    members = {"__init__": make, "__module__": plain.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    roomless: Any = type(plain.__name__, (plain,), members)
    model = roomless.from_pretrained(fspath(path), **options)
    model.__class__ = plain
    return model


def _read_config(path: str, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The configuration of the checkpoint at ``path``, and the options to load it with.

    One whose model type transformers knows by another name is among those: the type also says how tensors are stored.
    """
    sent, _ = transformers.PreTrainedConfig.get_config_dict(path)
    family_of(sent)
    known = SAME_AS.get(sent["model_type"])
    if known is None:
        return transformers.AutoConfig.from_pretrained(path), options
    of_model = {name: options[name] for name in ("dtype", "torch_dtype") if name in options}
    others = {name: value for name, value in options.items() if name not in of_model}
    sent = {**sent, "model_type": known, "name_or_path": path}
    config, rest = CONFIG_MAPPING[known].from_dict(sent, return_unused_kwargs=True, **others)
    return config, {"config": config, **rest, **of_model}


def _model_class(config: Any) -> Any:
    """The class that ``config`` names, or else the one that transformers generates text with."""
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    plain = next(filter(None, named), None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if plain is None:
        raise UnsupportedCheckpointError(
            f"transformers {transformers.__version__} has no language model of the model_type {config.model_type}"
        )
    return plain
