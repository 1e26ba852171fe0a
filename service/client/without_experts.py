"""Loads a checkpoint through transformers with no room for its experts: their tensors are never read."""

from collections.abc import Collection
from os import PathLike, fspath
from typing import Any

import transformers
from torch import nn

from ...layer.errors import UnsupportedCheckpointError
from .remote_modules import local_parts, moe_blocks


class Absent(nn.Module):
    """Experts that were not loaded."""


def load_without_experts(
    path: str | PathLike[str], layers: Collection[int] | None, options: dict[str, Any]
) -> transformers.PreTrainedModel:
    """``from_pretrained(path, **options)``, the experts of ``layers`` (None: every MoE layer) left out.

    transformers makes the modules first and then reads what they have room for, so a subclass takes the experts
    away as soon as they are made. Raises ``UnsupportedCheckpointError`` for a model that transformers does not have.
    """
    config = transformers.AutoConfig.from_pretrained(fspath(path))
    name = (config.architectures or [config.model_type])[0]
    plain = getattr(transformers, name, None)
    if plain is None:
        raise UnsupportedCheckpointError(f"transformers {transformers.__version__} has no model called {name}")

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
