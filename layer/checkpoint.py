"""Opens a Hugging Face folder and loads the MoE layers asked for, one at a time, in canonical form."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointNotFoundError, ConfigurationError, UnsupportedCheckpointError
from .families import Family, check_config, config_notes, family_of, layer_specs
from .naming import PREFIXES, Piece, find_block, group_by_layer, layer_pieces
from .shards import Shards, StoredTensor, is_file, is_folder, read_json
from .spec import LayerSpec, ModelSpec, ranges
from .weights import LayerWeights, shapes

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Checkpoint:
    """The MoE layers of one checkpoint folder; made by ``open_checkpoint``.

    ``model``  what is served, ``ModelSpec``
    ``notes``  what was cast, assumed or ignored, one sentence each
    """

    def __init__(
        self, model: ModelSpec, notes: Sequence[str], shards: Shards, plans: Mapping[int, "_LayerPlan"]
    ) -> None:
        self.model = model
        self.notes = tuple(notes)
        self._shards = shards
        self._plans = plans

    def layer_nbytes(self, index: int) -> int:
        """Bytes of ``load_layer(index)``, without reading it. Raises ``LayerNotServedError``."""
        plan = self._plans[self.model.layer(index).index]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.tensors.values())

    def load_layer(self, index: int) -> LayerWeights:
        """Read layer ``index`` into fresh memory and check it against its spec.

        Raises ``LayerNotServedError``, or ``CheckpointError`` if the files changed since they were opened.
        """
        spec = self.model.layer(index)
        plan = self._plans[index]
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in plan.tensors.items()}
        with self._shards.reader() as reader:
            for piece in plan.pieces:
                _copy(reader.read(piece.key, piece.rows), piece, tensors[piece.target])
        weights = LayerWeights(**tensors)
        weights.check(spec)
        return weights


def open_checkpoint(
    path: Path,
    *,
    layers: Sequence[int] | None = None,
    name: str | None = None,
    expert_slice: tuple[int, int] | None = None,
) -> Checkpoint:
    """Read ``config.json`` and the headers of the safetensors files under ``path``; no weights yet.

    ``layers``        the MoE layers to serve, None for all of them
    ``name``          what the model is called, by default the folder's name
    ``expert_slice``  ``(offset, count)`` of the experts held here, None for all

    Raises ``CheckpointNotFoundError`` for a missing folder or file, ``UnsupportedCheckpointError``
    for what is refused, ``ConfigurationError`` for layers or a slice that the checkpoint has not got.
    """
    path = Path(path)
    if not is_folder(path):
        raise CheckpointNotFoundError(f"{path} is not a folder: expected one with config.json and safetensors files")
    if not is_file(path / "config.json"):
        raise CheckpointNotFoundError(f"{path} has no config.json, so it is not a checkpoint")
    outer = read_json(path / "config.json")
    family = family_of(outer)
    config = _text_config(outer)
    for part in (outer, config):
        check_config(part, family)
    model = _choose(_model(path, name, outer["model_type"], config, family), layers, expert_slice)
    shards = Shards(path)
    keys = group_by_layer(shards.keys)
    plans = {index: _LayerPlan(spec, family, keys, shards) for index, spec in model.layers.items()}
    notes = [*config_notes(config, family), *_cast_notes(plans), *_ignored_notes(keys, model)]
    if "vision_config" in outer:
        notes.append("The vision tower is ignored: only the language model's MoE layers are served.")
    return Checkpoint(model, notes, shards, plans)


class _LayerPlan:
    """How one layer is put together: its stored pieces, and the shape and dtype of each tensor."""

    def __init__(self, spec: LayerSpec, family: Family, keys: Mapping[str, set[str]], shards: Shards) -> None:
        block = find_block(keys, family, spec.index)
        layer = f"{block.rsplit('.', 2)[0]}."
        self.stored = shards.describe(key for key in keys[layer] if key.startswith(block))
        self.pieces = layer_pieces(spec, family, block, self.stored)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        wanted = shapes(spec)
        for piece in self.pieces:
            shape = wanted[piece.target]
            assert shape is not None, f"{piece.target} has pieces, and layer {spec.index} has no such tensor"
            self.tensors[piece.target] = shape, _dtype(piece.target, self.stored[piece.key])


def _dtype(target: str, stored: StoredTensor) -> torch.dtype:
    """bf16, but for what decides the routing: the bias is fp32, the router as exact as it is stored."""
    if target == "correction_bias" or (target == "router" and stored.dtype != "BF16"):
        return torch.float32
    return torch.bfloat16


def _copy(stored: Tensor, piece: Piece, target: Tensor) -> None:
    values = stored.transpose(-1, -2) if piece.transposed else stored
    place = target[piece.place]
    if values.shape != place.shape:
        raise UnsupportedCheckpointError(f"{piece.key} changed on disk after the checkpoint was opened")
    place.copy_(values)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a composite config, or the config itself."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise UnsupportedCheckpointError(f"text_config in config.json should be an object, found {text!r}")
    return config if text is None else text


def _model(path: Path, name: str | None, model_type: str, config: Mapping[str, Any], family: Family) -> ModelSpec:
    specs = dict(enumerate(layer_specs(config, family)))
    return ModelSpec(
        name=name or path.resolve().name,
        model_type=model_type,
        path=path,
        num_hidden_layers=len(specs),
        layers={index: spec for index, spec in specs.items() if isinstance(spec, LayerSpec)},
        skipped={index: why for index, why in specs.items() if isinstance(why, str)},
    )


def _choose(model: ModelSpec, layers: Sequence[int] | None, expert_slice: tuple[int, int] | None) -> ModelSpec:
    """``model`` with only ``layers``, each holding only the experts of ``expert_slice``."""
    if not model.layers:
        raise UnsupportedCheckpointError("the checkpoint has no MoE layer: every layer is dense")
    wanted = set(model.layers) if layers is None else set(layers)
    for index in sorted(wanted - model.layers.keys()):
        why = model.skipped.get(index, f"there is no such layer, the model has {model.num_hidden_layers}")
        raise ConfigurationError(f"layer {index} cannot be served: {why}; the MoE layers are {ranges(model.layers)}")
    if not wanted:
        raise ConfigurationError(f"no layer was chosen; the MoE layers are {ranges(model.layers)}")
    served = {index: _sliced(model.layers[index], expert_slice) for index in sorted(wanted)}
    left_out = dict.fromkeys(model.layers.keys() - wanted, "it was left out when the checkpoint was opened")
    return replace(model, layers=served, skipped=dict(sorted({**model.skipped, **left_out}.items())))


def _sliced(spec: LayerSpec, expert_slice: tuple[int, int] | None) -> LayerSpec:
    if expert_slice is None:
        return spec
    offset, count = expert_slice
    if offset < 0 or count < 1 or offset + count > spec.num_experts:
        raise ConfigurationError(
            f"experts {offset}..{offset + count - 1} cannot be held: layer {spec.index} has {spec.num_experts} experts"
        )
    return spec.expert_slice(offset, count)


def _cast_notes(plans: Mapping[int, _LayerPlan]) -> Iterator[str]:
    casts: Counter[tuple[str, str]] = Counter()
    for plan in plans.values():
        for piece in plan.pieces:
            stored, kept = _DTYPES[plan.stored[piece.key].dtype], str(plan.tensors[piece.target][1])[6:]
            if stored != kept:
                casts[stored, kept] += 1
    for (stored, kept), count in sorted(casts.items()):
        yield f"{count} {'tensors are' if count > 1 else 'tensor is'} stored as {stored} and cast to {kept}."


def _ignored_notes(keys: Mapping[str, set[str]], model: ModelSpec) -> Iterator[str]:
    """Layers beside those of the language model: multi-token prediction, vision towers."""
    known = {f"{prefix}layers.{index}." for prefix in PREFIXES for index in range(model.num_hidden_layers)}
    stray = keys.keys() - known - {""}
    beyond = {layer for layer in stray if layer.removesuffix(f"layers.{layer.split('.')[-2]}.") in PREFIXES}
    towers = {f"{layer.rsplit('.', 2)[0]}.*" for layer in stray - beyond}
    for name in sorted(beyond):
        yield f"{name}* is ignored: it lies beyond the {model.num_hidden_layers} layers (multi-token prediction)."
    for name in sorted(towers):
        yield f"{name} is ignored: it is not part of the language model's layers."
