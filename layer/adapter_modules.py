"""Reads the LoRA of single modules: one expert's projections, or those of the shared experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .adapter import LoraWeights
from .adapter_config import AdapterConfig
from .adapter_keys import LoraPair
from .adapter_tensors import StoredTensor, TensorFile
from .errors import AdapterRefusedError
from .spec import LayerSpec

Projections = Iterator[tuple[str, LoraWeights]]
"""(name in ``LayerAdapter``, weights) pairs."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the weight that a stored projection changes: ``[out_features, in_features]``.

    ``parts`` are the projections of ``LayerAdapter`` that it holds, one above the other, each of
    ``part_features`` rows.
    """

    in_features: int
    parts: tuple[str, ...]
    part_features: int

    @property
    def out_features(self) -> int:
        """Rows of all parts together."""
        return len(self.parts) * self.part_features


def dimensions(spec: LayerSpec, projection: str, *, shared: bool = False) -> Dimensions:
    """The sizes of ``projection`` (``gate``, ``up``, ``down`` or ``gate_up``) of routed or shared experts."""
    width = spec.shared_intermediate_size if shared else spec.intermediate_size
    names = ("gate", "up") if projection == "gate_up" else (projection,)
    parts = tuple(f"shared_{name}" for name in names) if shared else names
    if projection == "down":
        return Dimensions(width, parts, spec.hidden_size)
    return Dimensions(spec.hidden_size, parts, width)


@dataclass(frozen=True, slots=True)
class Source:
    """Where ranks, scalings and values of an adapter come from, and the rank that a slot can hold."""

    file: TensorFile
    config: AdapterConfig
    max_rank: int

    def check_rank(self, pair: LoraPair, rank: int) -> None:
        """Raise ``AdapterRefusedError`` if ``rank`` is more than a slot holds."""
        if rank > self.max_rank:
            raise AdapterRefusedError(pair.a.key, f"a rank of at most {self.max_rank}", f"rank {rank}")

    def read(self, pair: LoraPair) -> tuple[Tensor, Tensor]:
        """A and B as stored, in bf16."""
        return self.file.read(pair.a), self.file.read(pair.b)


def expect_shape(stored: StoredTensor, rank: int, *shapes: tuple[int, ...]) -> None:
    """Raise ``AdapterRefusedError`` unless ``stored`` has one of ``shapes``, those of a module of ``rank``."""
    if stored.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise AdapterRefusedError(
            stored.key, f"shape {wanted} (rank {rank} by adapter_config.json)", f"{list(stored.shape)}"
        )


def read_modules(source: Source, size: Dimensions, pairs: Mapping[int, LoraPair], num_experts: int) -> Projections:
    """One projection of ``num_experts`` experts, each of which has its own pair or none.

    Ranks may differ: A and B are padded with zeros, expert by expert. Where one A serves gate and
    up, both have the same tensor. Raises ``AdapterRefusedError``.
    """
    ranks = torch.zeros(num_experts, dtype=torch.int32)
    scaling = torch.zeros(num_experts, dtype=torch.float32)
    for expert, pair in pairs.items():
        if expert >= num_experts:
            raise AdapterRefusedError(pair.a.key, f"one of the base's {num_experts} experts", f"expert {expert}")
        rank = source.config.rank_of(pair.module)
        source.check_rank(pair, rank)
        expect_shape(pair.a, rank, (rank, size.in_features))
        expect_shape(pair.b, rank, (size.out_features, rank))
        ranks[expert] = rank
        scaling[expert] = source.config.scaling_of(pair.module)

    largest = int(ranks.max())
    a = torch.zeros(num_experts, largest, size.in_features, dtype=torch.bfloat16)
    b = [torch.zeros(num_experts, size.part_features, largest, dtype=torch.bfloat16) for _ in size.parts]
    for expert, pair in pairs.items():
        rank = int(ranks[expert])
        stored_a, stored_b = source.read(pair)
        a[expert, :rank] = stored_a
        for part, rows in zip(b, torch.split(stored_b, size.part_features), strict=True):
            part[expert, :, :rank] = rows
    for name, part in zip(size.parts, b, strict=True):
        yield name, LoraWeights(a=a, b=part, scaling=scaling, ranks=ranks)
