"""Whether a launch's declared reads and writes are true: run alone, does it touch anything else of its arena?"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from moelet.graphs.arena import Arena
from moelet.graphs.memory import POISON
from moelet.graphs.streams import Stream


class Launch(Protocol):
    """What is needed of a ``PreparedLaunch``."""

    label: str
    reads: frozenset[str]
    writes: frozenset[str]
    stream: Stream

    def launch(self) -> None: ...


def false_declarations(launches: Iterable[Launch], arena: Arena) -> list[str]:
    """Run ``launches`` in order, each twice from the same state, and say which touch what they do not declare.

    The second run has every undeclared buffer poisoned: a launch that reads one gives other output, and one that
    writes one changes the poison even where it wrote what was there before.
    """
    found = []
    for launch in launches:
        before = snapshot(arena)
        after = run(launch, arena)
        declared = launch.reads | launch.writes
        hidden = {name: data if name in declared else poisoned(data) for name, data in before.items()}
        restore(arena, hidden)
        again = run(launch, arena)
        stray = (changed(before, after) | changed(hidden, again)) - launch.writes
        found += [f"{launch.label} writes {name}, which it does not declare" for name in sorted(stray)]
        differing = sorted(changed(after, again) & launch.writes)
        found += [f"{launch.label} reads what it does not declare: {name} differs" for name in differing]
        restore(arena, after)
    return found


def run(launch: Launch, arena: Arena) -> dict[str, Tensor]:
    launch.launch()
    launch.stream.synchronize()
    return snapshot(arena)


def snapshot(arena: Arena) -> dict[str, Tensor]:
    return {name: arena.read(name).reshape(-1).view(torch.uint8) for name in arena.plan.buffers}


def restore(arena: Arena, data: dict[str, Tensor]) -> None:
    for name, spec in arena.plan.buffers.items():
        arena.write(name, data[name].view(spec.dtype).view(spec.shape))


def poisoned(data: Tensor) -> Tensor:
    return torch.full_like(data, POISON)


def changed(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    return {name for name in first if not torch.equal(first[name], second[name])}
