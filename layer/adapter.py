"""A LoRA adapter after parsing: canonical tensors per layer, whatever layout it was stored in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor


class AdapterLayout(StrEnum):
    """How an adapter's experts relate: each its own A and B, or an outer matrix shared by all."""

    PER_EXPERT = "per_expert"
    SHARED_OUTER = "shared_outer"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """A and B of one projection of one layer, for all ``E`` experts of the checkpoint.

    ``delta_e = scaling[e] * B_e @ A_e`` is added to expert ``e``'s weight ``[out, in]``.

    ``a``        bf16 ``[E, r, in]``, or ``[1, r, in]`` when one A serves all experts
    ``b``        bf16 ``[E, out, r]``, or ``[1, out, r]`` when one B serves all experts
    ``scaling``  fp32 ``[E]``; alpha/r (or alpha/sqrt(r)) of that expert's own r and alpha
    ``ranks``    int32 ``[E]``; the true rank of each expert, 0 where the adapter has none for it;
                 rows of ``a`` and columns of ``b`` at and above it are zero

    The projections of the shared experts use the same form with ``E = 1``.
    """

    a: Tensor
    b: Tensor
    scaling: Tensor
    ranks: Tensor

    @property
    def rank(self) -> int:
        """The padded rank r of the tensors: the largest of ``ranks``."""
        return int(self.a.shape[1])

    @property
    def is_shared_outer(self) -> bool:
        """Whether A or B is one matrix for all of several experts."""
        return len(self.ranks) > 1 and (self.a.shape[0] == 1 or self.b.shape[0] == 1)

    @property
    def nbytes(self) -> int:
        """Bytes of A, B, scaling and ranks."""
        return self.a.nbytes + self.b.nbytes + self.scaling.nbytes + self.ranks.nbytes


PROJECTIONS = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """The projections that an adapter changes in one layer; None where it leaves one alone.

    ``gate`` and ``up`` have in = H and out = I, ``down`` has in = I and out = H; the ``shared_``
    ones are of the shared experts, of width Is.
    """

    gate: LoraWeights | None = None
    up: LoraWeights | None = None
    down: LoraWeights | None = None
    shared_gate: LoraWeights | None = None
    shared_up: LoraWeights | None = None
    shared_down: LoraWeights | None = None

    def items(self) -> Iterator[tuple[str, LoraWeights]]:
        """The (projection, weights) pairs that are there, in the order of ``PROJECTIONS``."""
        for name in PROJECTIONS:
            weights: LoraWeights | None = getattr(self, name)
            if weights is not None:
                yield name, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What is told of an adapter, in whatever form it is kept; see ``Adapter``, and ``nbytes`` are those of that form.

    ``layers`` are those that it changes, ascending.
    """

    path: Path
    rank: int
    lora_alpha: float
    scaling: float
    max_rank: int
    layout: AdapterLayout
    layers: tuple[int, ...]
    targets: tuple[str, ...]
    nbytes: int
    ignored_keys: tuple[str, ...]


class KeptAdapter(Protocol):
    """An adapter as the host keeps it for an engine: an ``Adapter``, or what that engine made of one beforehand."""

    @property
    def facts(self) -> AdapterFacts:
        """What is told of it."""

    def at(self, path: Path) -> Self:
        """The same, told of as lying at ``path``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One parsed and validated adapter: immutable, on the host, ready to be put into a slot.

    ``rank``, ``lora_alpha`` and ``scaling`` are those of the configuration's top level, for
    people; the maths uses ``LoraWeights.scaling``. ``targets`` names the projections changed.
    ``ignored_keys`` are the tensor keys that belong to modules that are not served.
    ``facts`` is what is told of it, worked out once: every scrape of the metrics asks, where requests wait.
    """

    path: Path
    rank: int
    lora_alpha: float
    scaling: float
    layers: Mapping[int, LayerAdapter]
    ignored_keys: tuple[str, ...] = ()
    targets: tuple[str, ...] = field(init=False)
    facts: AdapterFacts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        present = {name for layer in self.layers.values() for name, _ in layer.items()}
        object.__setattr__(self, "targets", tuple(p for p in PROJECTIONS if p in present))
        object.__setattr__(self, "facts", self._facts())

    def _facts(self) -> AdapterFacts:
        return AdapterFacts(
            path=self.path,
            rank=self.rank,
            lora_alpha=self.lora_alpha,
            scaling=self.scaling,
            max_rank=self.max_rank,
            layout=self.layout,
            layers=tuple(sorted(self.layers)),
            targets=self.targets,
            nbytes=self.nbytes,
            ignored_keys=self.ignored_keys,
        )

    def at(self, path: Path) -> "Adapter":
        """The same, told of as lying at ``path``."""
        return replace(self, path=path)

    def _weights(self) -> Iterator[LoraWeights]:
        for layer in self.layers.values():
            for _, weights in layer.items():
                yield weights

    @property
    def max_rank(self) -> int:
        """The largest padded rank of any projection: what a slot must hold."""
        return max((w.rank for w in self._weights()), default=0)

    @property
    def layout(self) -> AdapterLayout:
        """Per expert, shared-outer, or a mixture of both over projections and layers."""
        kinds = {w.is_shared_outer for w in self._weights()}
        if kinds == {True}:
            return AdapterLayout.SHARED_OUTER
        return AdapterLayout.MIXED if True in kinds else AdapterLayout.PER_EXPERT

    @property
    def nbytes(self) -> int:
        """Host bytes of all tensors; one that serves several projections counts once."""
        tensors = (tensor for w in self._weights() for tensor in (w.a, w.b, w.scaling, w.ranks))
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
