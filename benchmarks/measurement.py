"""Every measurement of one layer that a command line asks for: workloads, plans and peers, each as a row."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moelet.graphs.geometry import Geometry
from moelet.graphs.program import Plan
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec

from . import peers
from .floor import Hits, matrix_bytes
from .forwards import Forwards, WeightSet, engine_plan, forwards_per_graph
from .report import Row, rounded
from .rig import Rig
from .workload import ALL, Routing, Workload, random_batches, relative_error, worst

CHECKED = 2
"""Forwards of a graph that are compared with the oracle."""
LARGEST_ERROR = 1e-2


def geometry_of(spec: LayerSpec, chosen: argparse.Namespace) -> Geometry:
    """The geometry of ``spec`` with the slots that ``chosen`` asks for; none where only the base is measured."""
    rank = chosen.max_lora_rank or max(chosen.ranks)
    slots = chosen.slots if max(chosen.ranks) else 0
    return Geometry.of(spec, router_fp32=False, max_loras=slots, max_lora_rank=rank if slots else 0)


def workloads(chosen: argparse.Namespace, rank: int, *, shared_outer: bool) -> Iterator[Workload]:
    """One workload for each token count and, with LoRA, number of adapters that so many tokens can have."""
    for tokens in chosen.tokens:
        work = Workload(num_tokens=tokens, routing=Routing(chosen.routing), rank=rank, shared_outer=shared_outer)
        if rank == 0:
            yield work
            continue
        for adapters in chosen.adapters:
            if adapters == 1 or (tokens > 1 and (adapters == ALL or int(adapters) <= tokens)):
                yield replace(work, adapters=adapters)


def plans(chosen: argparse.Namespace, workload: Workload, auto: Plan) -> list[Plan]:
    """The plans to measure ``workload`` under; without LoRA there is but one. ``auto`` is what an engine takes."""
    if not workload.lora:
        return [Plan.FUSED]
    if chosen.plan == "auto":
        return [auto]
    return list(Plan) if chosen.plan == "all" else [Plan(chosen.plan)]


def costs(spec: LayerSpec, workload: Workload, batches: Sequence[LayerBatch]) -> Row:
    """What the routings of ``batches`` must read, on average over them."""
    hits = [Hits.of(spec, batch) for batch in batches]
    matrices = [matrix_bytes(spec, each, workload.rank, shared_outer=workload.shared_outer) for each in hits]
    total = sum(sum(matrix.values()) for matrix in matrices)
    weights = sum(matrix["gate_up"] + matrix["down"] for matrix in matrices)
    return {
        "experts": round(sum(each.experts for each in hits) / len(hits), 2),
        "pairs": round(sum(each.pairs for each in hits) / len(hits), 2),
        "weight_bytes": weights // len(hits),
        "lora_bytes": (total - weights) // len(hits),
    }


def judged(error: float | None, *, same: bool | None = None) -> Row:
    """An error and whether replays agreed as rows hold them, None where nothing was compared, and whether the output
    counts as wrong."""
    wrong = same is False or (error is not None and not error <= LARGEST_ERROR)
    return {"error": None if error is None else rounded(error, 3), "repeatable": same, "wrong": wrong}


class LayerMeasurement:
    """All measurements of one shape. Iterating makes them: the base's rows, each followed by its peers', then LoRA's.

    ``absent_peers`` says why a peer has no rows. A base of as many tokens that was measured before gives ``of_base``.
    """

    def __init__(self, rig: Rig, chosen: argparse.Namespace, name: str, spec: LayerSpec) -> None:
        self._rig, self._chosen, self._name, self._spec = rig, chosen, name, spec
        self._geometry = geometry_of(spec, chosen)
        self._base_us: dict[int, float] = {}
        self._peers: dict[str, peers.Layer] = {}
        self.absent_peers: dict[str, str] = {}
        if chosen.peers and 0 in chosen.ranks:
            self._peers, self.absent_peers = peers.importable(spec, rig.torch_device)

    def __iter__(self) -> Iterator[Row]:
        chosen, spec = self._chosen, self._spec
        sets = [WeightSet(self._rig, spec, self._geometry, seed) for seed in range(chosen.sets)]
        for rank in chosen.ranks:
            for shared_outer in (False, True) if rank and chosen.shared_outer else (False,):
                if rank:
                    for each in sets:
                        each.install(self._geometry.max_loras, rank, shared_outer=shared_outer)
                for workload in workloads(chosen, rank, shared_outer=shared_outer):
                    yield from self._rows(workload, sets)
        for each in sets:
            each.close()

    def _rows(self, workload: Workload, sets: Sequence[WeightSet]) -> Iterator[Row]:
        count = forwards_per_graph(self._spec, workload.num_tokens)
        batches = random_batches(self._spec, workload, count, self._geometry.max_loras)
        checked = range(min(CHECKED, count) if self._chosen.check else 0)
        truths = [sets[i % len(sets)].exact_output(batches[i]) for i in checked]
        cost = costs(self._spec, workload, batches)
        auto = engine_plan(self._rig.device.name, self._geometry, workload.num_tokens)
        for plan in plans(self._chosen, workload, auto):
            row = self._measured(Forwards(self._rig, self._geometry, workload, plan, sets, batches), workload, truths)
            if not workload.lora:
                self._base_us[workload.num_tokens] = row["us"]
            yield self._held_to_floor(row, cost, self._base_us.get(workload.num_tokens))
        if not workload.lora:
            for row in peers.peer_rows(
                self._rig, self._peers, self.absent_peers, sets, batches, truths, self._chosen.replays
            ):
                named = self._named(workload) | row | judged(row["error"])
                yield self._held_to_floor(named, cost, None)

    def _named(self, workload: Workload) -> Row:
        return {"shape": self._name, "tokens": workload.num_tokens, "routing": workload.routing.value}

    def _measured(self, forwards: Forwards, workload: Workload, truths: Sequence[Tensor]) -> Row:
        replay = partial(forwards.capture().launch, self._rig.streams.main)
        replay()
        first = forwards.outputs()
        timing = self._rig.time(replay, replays=self._chosen.replays, forwards=forwards.count)
        same = all(map(torch.equal, first, forwards.outputs())) if self._chosen.check else None
        errors = [relative_error(out, truth) for out, truth in zip(first, truths, strict=False)]
        row = self._named(workload) | {
            "plan": forwards.plan.value,
            "rank": workload.rank,
            "adapters": workload.adapters,
            "layout": workload.layout,
            "slot_rank": self._geometry.max_lora_rank if workload.lora else None,
            "forwards": forwards.count,
        }
        forwards.close()
        return row | timing.row() | judged(worst(errors), same=same)

    def _held_to_floor(self, row: Row, cost: Row, base_us: float | None) -> Row:
        floor = self._rig.floor_us(cost["weight_bytes"] + cost["lora_bytes"])
        of_base = None if base_us is None else round(row["us"] / base_us, 4)
        return row | cost | {"floor_us": round(floor, 2), "fraction": round(floor / row["us"], 4), "of_base": of_base}
