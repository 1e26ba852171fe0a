"""The adapter groups of a sorted batch on the GPU, and what each one's adapter does to a projection."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from moelet.layer.adapter import LoraWeights
from oracle import assert_close_to_truth
from placed_rows import Placed, assert_rest_is_poison

HALVES = {"gate_up": ("gate", "up"), "down": ("down",)}
"""The two halves of a layer's LoRA and their projections."""


@dataclass
class Group:
    """One (expert, adapter) pair of a batch: its rows and what its adapter does to one projection."""

    rows: slice
    tokens: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def stored_rank(self) -> int:
        return -(-self.rank // 8) * 8


def groups(case: Placed, projection: str) -> Iterator[Group]:
    """The groups of a batch of a layer without shared experts."""
    token_of = dict(zip(case.rows.places.tolist(), case.rows.tokens.tolist(), strict=True))
    for expert, slot, first, count in case.made.groups:
        adapter = case.layer.adapters[slot]
        assert adapter is not None
        lora: LoraWeights | None = getattr(adapter.layers[case.layer.spec.index], projection)
        tokens = torch.tensor([token_of[row] for row in range(first, first + count)])
        rows = slice(first, first + count)
        if lora is None:
            yield Group(rows, tokens, torch.empty(0, 0), torch.empty(0, 0), 0.0)
            continue
        rank = int(lora.ranks[expert])
        a = lora.a[expert if len(lora.a) > 1 else 0, :rank]
        b = lora.b[expert if len(lora.b) > 1 else 0, :, :rank]
        yield Group(rows, tokens, a, b, float(lora.scaling[expert]))


def grouped_rows(case: Placed) -> Tensor:
    """The rows of all groups."""
    return torch.tensor([row for _, _, first, count in case.made.groups for row in range(first, first + count)])


@dataclass
class Compared:
    """Values, truths and baselines of many small groups, told by the rule all together."""

    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, value: Tensor, truth: Tensor, baseline: Tensor) -> None:
        assert value.shape == truth.shape == baseline.shape
        self.parts.append((value.flatten().double(), truth.flatten(), baseline.flatten().double()))

    def check(self) -> None:
        assert_close_to_truth(*(torch.cat(part) for part in zip(*self.parts, strict=True)))


def assert_shrunk(case: Placed, half: str, stored: Tensor, act: Tensor) -> None:
    """``stored``, h of a half ``[rows, projections, ranks]``, is that of every group, and the rest was left alone;
    ``act`` is what down had."""
    compared = Compared()
    live = [
        max(group.stored_rank for group in pair) for pair in zip(*(groups(case, p) for p in HALVES[half]), strict=True)
    ]
    for index, projection in enumerate(HALVES[half]):
        for group, written in zip(groups(case, projection), live, strict=True):
            h = stored[group.rows, index]
            assert h[:, written:].isnan().all(), "ranks that neither projection has are left alone"
            assert (h[:, group.rank : written] == 0).all(), "those that only the other has are zero"
            if group.rank:
                x = act[group.rows] if half == "down" else case.batch.hidden_states[group.tokens]
                truth = x.double() @ group.a.double().T * group.scaling
                compared.add(h[:, : group.rank], truth, F.linear(x, group.a) * group.scaling)
    compared.check()
    assert_rest_is_poison(stored, grouped_rows(case))
