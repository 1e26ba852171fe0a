"""Adapters of every kind that a slot may hold: any rank, ragged, one-sided, with alpha 0, with an outer matrix."""

from dataclasses import replace

import torch

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.spec import LayerSpec
from random_layers import adapter_of, random_adapter, random_lora


def of_rank(spec: LayerSpec, rank: int, seed: int = 0, *, shared_outer: bool = False, device: str = "cpu") -> Adapter:
    """An adapter whose every projection has exactly ``rank``."""
    g = torch.Generator(device).manual_seed(seed + 3000)
    hidden, width, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    shared = spec.shared_intermediate_size
    layer = LayerAdapter(
        gate=random_lora(g, experts, rank, hidden, width, one_a=shared_outer),
        up=random_lora(g, experts, rank, hidden, width, one_a=shared_outer),
        down=random_lora(g, experts, rank, width, hidden, one_b=shared_outer),
        shared_gate=random_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_up=random_lora(g, 1, rank, hidden, shared) if shared else None,
        shared_down=random_lora(g, 1, rank, shared, hidden) if shared else None,
    )
    return adapter_of(spec, layer, rank)


def ragged(spec: LayerSpec, rank: int, seed: int = 0) -> Adapter:
    """Every expert has a rank of its own, from 0 to ``rank``, gate another than up."""
    layer = random_adapter(spec, seed, rank=rank).layers[spec.index]
    cut = {name: cut_ranks(lora, step) for step, (name, lora) in enumerate(layer.items(), 5)}
    return adapter_of(spec, replace(layer, **cut), rank)


def cut_ranks(lora: LoraWeights, step: int) -> LoraWeights:
    """``lora`` with ranks ``0, step, 2 * step, ...`` modulo the rank plus one, zeros where a rank ends."""
    ranks = (torch.arange(len(lora.ranks)) * step % (lora.rank + 1)).to(torch.int32)
    live = torch.arange(lora.rank)[None, :] < ranks[:, None]
    return replace(lora, a=lora.a * live[:, :, None], b=lora.b * live[:, None, :], ranks=ranks)


def uneven(spec: LayerSpec, gate: int, up: int, down: int = 9, seed: int = 0) -> Adapter:
    """An adapter whose projections have ranks of their own; 0: none."""
    ranks = {"gate": gate, "up": up, "down": down}
    parts = {
        f"{kind}{name}": getattr(of_rank(spec, rank, seed).layers[spec.index], f"{kind}{name}") if rank else None
        for name, rank in ranks.items()
        for kind in ("", "shared_")
    }
    return adapter_of(spec, LayerAdapter(**parts), max(ranks.values()))


def only(spec: LayerSpec, adapter: Adapter, *projections: str) -> Adapter:
    """``adapter`` less all but some of its projections."""
    layer = adapter.layers[spec.index]
    return adapter_of(spec, LayerAdapter(**{name: getattr(layer, name) for name in projections}), adapter.rank)


def at_experts(spec: LayerSpec, adapter: Adapter, *experts: int) -> Adapter:
    """``adapter``, of a layer without shared experts, with a rank at some experts alone."""
    layer, there = adapter.layers[spec.index], torch.zeros(spec.num_experts, dtype=torch.int32)
    there[list(experts)] = 1
    live = there[:, None, None]
    parts = {
        name: replace(lora, a=lora.a * live, b=lora.b * live, ranks=lora.ranks * there) for name, lora in layer.items()
    }
    return adapter_of(spec, replace(layer, **parts), adapter.rank)


def scaled(spec: LayerSpec, adapter: Adapter, factor: float) -> Adapter:
    """``adapter`` with every scaling multiplied: 0 is what alpha 0 makes."""
    layer = adapter.layers[spec.index]
    parts = {name: replace(lora, scaling=lora.scaling * factor) for name, lora in layer.items()}
    return adapter_of(spec, replace(layer, **parts), adapter.rank)


def zeroed(spec: LayerSpec, adapter: Adapter) -> Adapter:
    """``adapter`` with every B zero, as training starts from."""
    layer = adapter.layers[spec.index]
    parts = {name: replace(lora, b=torch.zeros_like(lora.b)) for name, lora in layer.items()}
    return adapter_of(spec, replace(layer, **parts), adapter.rank)


def mixture(spec: LayerSpec, device: str = "cpu") -> list[Adapter | None]:
    """Eight adapters of ranks 1 to 64 that differ in layout, one with alpha 0, and two one-sided."""
    return [
        of_rank(spec, 1, 1, device=device),
        of_rank(spec, 3, 2, device=device),
        of_rank(spec, 8, 3, shared_outer=True, device=device),
        of_rank(spec, 16, 4, device=device),
        of_rank(spec, 24, 5, shared_outer=True, device=device),
        of_rank(spec, 64, 6, device=device),
        scaled(spec, of_rank(spec, 8, 7, device=device), 0.0),
        only(spec, of_rank(spec, 16, 8, device=device), "up", "down"),
    ]


def of_every_kind(spec: LayerSpec) -> list[Adapter | None]:
    """Ranks from 3 to 100, gate unlike up, and one-sided: 20 blocks of ranks and more meet in a tile."""
    return [
        uneven(spec, 20, 3),
        uneven(spec, 0, 24, 40, seed=1),
        only(spec, of_rank(spec, 24, 2), "gate"),
        only(spec, of_rank(spec, 11, 3), "down"),
        ragged(spec, 17, 4),
        of_rank(spec, 64, 5, shared_outer=True),
        of_rank(spec, 100, 6),
        uneven(spec, 3, 72, 1, seed=7),
    ]
