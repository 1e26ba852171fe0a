"""Reads LoRA stored for all experts at once: 3-D stacks, shared-outer ones, and PEFT's packed parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .adapter import LoraWeights
from .adapter_config import AdapterConfig
from .adapter_keys import LoraPair
from .adapter_modules import Dimensions, Projections, Source, dimensions, expect_shape
from .errors import AdapterRefusedError
from .spec import LayerSpec, ModelSpec

Orientation = Literal["linear", "swapped"]

_PARAMETERS = ("gate_up", "down")
"""From the inner wrapper outwards: the order in which the modules of transformers register them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPair:
    """A pair of which PEFT's ``target_parameters`` made A ``[r*E, in]`` and B ``[out, r*E]``.

    ``orientation`` is ``"linear"`` where A reads the projection's input, ``"swapped"`` where A and B
    are those of the transposed weight.
    """

    pair: LoraPair
    projection: str
    parameter: str
    orientation: Orientation


def read_stacked(source: Source, spec: LayerSpec, pair: LoraPair, projection: str) -> Projections:
    """A ``[E, r, in]`` and B ``[E, out, r]``; either may be one matrix for all experts, ``[1, …]``."""
    size = dimensions(spec, projection)
    rank = source.config.rank_of(pair.module)
    _check_stored_rank(source, pair, size, rank)
    counts = {1, spec.num_experts}
    expect_shape(pair.a, rank, *((count, rank, size.in_features) for count in sorted(counts)))
    expect_shape(pair.b, rank, *((count, size.out_features, rank) for count in sorted(counts)))
    a, b = source.read(pair)
    return _split(source, pair, size, a, b, pair.module, spec.num_experts)


def read_packed(source: Source, spec: LayerSpec, packed: PackedPair) -> Projections:
    """A and B of a wrapped parameter, unpacked.

    In A the expert is the slow index of the rows (``A[e*r:(e+1)*r]``), in B the fast one of the
    columns (``B[:, e::E]``), as in ``peft.tuners.lora.layer.ParamWrapper``.
    """
    pair, experts = packed.pair, spec.num_experts
    size = dimensions(spec, packed.projection)
    rank = source.config.rank_of(packed.parameter)
    _check_stored_rank(source, pair, size, rank)
    a, b = source.read(pair)
    outer = a.view(experts, rank, -1)
    inner = b.view(-1, rank, experts)
    if packed.orientation == "linear":
        a, b = outer, inner.permute(2, 0, 1)
    else:
        a, b = inner.permute(2, 1, 0).contiguous(), outer.transpose(1, 2)
    return _split(source, pair, size, a, b, packed.parameter, experts)


def find_packed(pairs: Iterable[LoraPair], model: ModelSpec, config: AdapterConfig) -> list[PackedPair]:
    """Which parameter every packed pair belongs to, and its orientation.

    Of two wrappers around a layer's experts the inner is ``gate_up_proj`` and the outer ``down_proj``;
    a single one is what ``target_parameters`` names. Shapes tell the orientation; where a shape is square, the
    adapter's other tensors do. Raises ``AdapterRefusedError`` where nothing does.
    """
    by_layer: dict[int, list[LoraPair]] = {}
    for pair in pairs:
        by_layer.setdefault(pair.place.layer, []).append(pair)
    named = [found for layer in by_layer.values() for found in _name_parameters(layer, config)]
    fitting = [_orientations(pair, model.layers[pair.place.layer], name, config) for pair, name in named]
    certain = {choices[0] for choices in fitting if len(choices) == 1}
    found = []
    for (pair, name), choices in zip(named, fitting, strict=True):
        orientations = choices if len(choices) == 1 else tuple(certain)
        if len(orientations) != 1:
            raise AdapterRefusedError(
                pair.a.key,
                "another tensor that tells how A and B are oriented, as this one is square",
                "none that does",
            )
        parameter = f"{pair.module}.{name}_proj"
        found.append(PackedPair(pair=pair, projection=name, parameter=parameter, orientation=orientations[0]))
    return found


def _name_parameters(pairs: list[LoraPair], config: AdapterConfig) -> list[tuple[LoraPair, str]]:
    """(pair, ``"gate_up"`` or ``"down"``) of the wrapped parameters of one layer."""
    inner_first = sorted(pairs, key=lambda pair: -pair.place.depth)
    module = inner_first[0].module
    targeted = [name for name in _PARAMETERS if config.targets(f"{module}.{name}_proj")]
    if len(targeted) < len(pairs):
        names = " and ".join(f"{name}_proj" for name in targeted) or "neither gate_up_proj nor down_proj"
        raise AdapterRefusedError(
            inner_first[-1].a.key,
            f"target_parameters in adapter_config.json to name what it changes of {module}",
            names,
        )
    if len(targeted) > len(pairs):
        targeted = ["gate_up"] if inner_first[0].place.depth else ["down"]
    return list(zip(inner_first, targeted, strict=True))


def _orientations(pair: LoraPair, spec: LayerSpec, projection: str, config: AdapterConfig) -> tuple[Orientation, ...]:
    """The orientations that the shapes of ``pair`` allow, one or both."""
    size, experts = dimensions(spec, projection), spec.num_experts
    rank = config.rank_of(f"{pair.module}.{projection}_proj")
    shapes: Mapping[Orientation, tuple[tuple[int, int], tuple[int, int]]] = {
        "linear": ((rank * experts, size.in_features), (size.out_features, rank * experts)),
        "swapped": ((rank * experts, size.out_features), (size.in_features, rank * experts)),
    }
    fitting = tuple(name for name, wanted in shapes.items() if (pair.a.shape, pair.b.shape) == wanted)
    if not fitting:
        expect_shape(pair.a, rank, *(a for a, _ in shapes.values()))
        expect_shape(pair.b, rank, *(b for a, b in shapes.values() if a == pair.a.shape))
    return fitting


def _check_stored_rank(source: Source, pair: LoraPair, size: Dimensions, rank: int) -> None:
    """Refuse a rank that is too large even if half of B turns out to be empty."""
    could_halve = len(size.parts) == 2 and rank % 2 == 0
    source.check_rank(pair, rank // 2 if could_halve else rank)


def _split(
    source: Source, pair: LoraPair, size: Dimensions, a: Tensor, b: Tensor, module: str, num_experts: int
) -> Projections:
    """A ``[E|1, r, in]`` and B ``[E|1, out, r]`` as the projections that B's rows hold, all with the same A."""
    parts = torch.split(b, size.part_features, dim=1)
    sides: tuple[Tensor, ...] = (a,) * len(parts)
    half = a.shape[1] // 2
    if _is_block_diagonal(parts):
        sides = (a[:, :half], a[:, half:])
        parts = (parts[0][:, :, :half], parts[1][:, :, half:])
    rank = sides[0].shape[1]
    source.check_rank(pair, rank)
    ranks = torch.full((num_experts,), rank, dtype=torch.int32)
    scaling = torch.full((num_experts,), source.config.scaling_of(module), dtype=torch.float32)
    for name, side, part in zip(size.parts, sides, parts, strict=True):
        yield name, LoraWeights(a=side.contiguous(), b=part.contiguous(), scaling=scaling, ranks=ranks)


def _is_block_diagonal(parts: tuple[Tensor, ...]) -> bool:
    """Whether gate uses the first half of the rank alone and up the second: two adapters that PEFT fused.

    PEFT does that to per-expert adapters of older models when it saves them again; taken apart they
    cost half the rank, and nothing else changes.
    """
    if len(parts) != 2 or parts[0].shape[2] % 2:
        return False
    half = parts[0].shape[2] // 2
    crossed = parts[0][:, :, half:].any() or parts[1][:, :, :half].any()
    return not crossed and bool(parts[0].any() or parts[1].any())
