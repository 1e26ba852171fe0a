"""The captured graphs of one geometry, one for each token count, routing input, and with or without LoRA."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from .arena import Arena, shared_memory
from .asked import AskedKernels
from .buffers import RoutingInput, plan_buffers
from .capture import CapturedGraph, capture
from .compiler import Specialisation
from .geometry import MLP_TOKENS, Geometry
from .kernels import Kernels, KernelSource, Progress
from .launches import Launches
from .memory import DeviceBuffer
from .program import Plan, Program, build_program
from .streams import Events, Stream, Streams

SMALLEST_EAGER = 512
"""The first of the shapes that are not captured."""
EAGER_PLAN = Plan.FUSED
"""The plan of what is not captured: one stream."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a graph is captured for: tokens, routing input, and whether any token has an adapter."""

    num_tokens: int
    routing: RoutingInput
    lora: bool

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, {self.routing}{', LoRA' if self.lora else ''}"


@dataclass(frozen=True, slots=True)
class Runnable:
    """A variant ready to run: its arena, its program and, where it was captured, its graph; ``wide``: by wide GEMMs."""

    variant: Variant
    arena: Arena
    program: Program
    graph: CapturedGraph | None
    wide: bool = False

    def run(self, stream: Stream) -> None:
        """Put one forward on ``stream``: a graph launch, or the program eagerly."""
        if self.graph is not None:
            self.graph.launch(stream)
        else:
            self.program.run()


class _Way(NamedTuple):
    """How a variant of the pool runs."""

    plan: Plan
    captured: bool
    wide: bool


class GraphPool:
    """All variants of one geometry over one shared allocation.

    ``shapes`` are captured, largest first; ``eager_shapes`` up to ``eager_tokens`` run eagerly on one stream. Arenas
    share memory because forwards follow each other on the main stream. ``plans`` has the plan of every shape
    that is prepared to be captured.
    """

    def __init__(
        self,
        geometry: Geometry,
        shapes: Sequence[int],
        eager_tokens: int,
        *,
        kernels: Kernels,
        streams: Streams,
        events: Events,
        sm_count: int,
        plans: Mapping[int, Plan] | None = None,
        memory: DeviceBuffer | None = None,
    ) -> None:
        self.geometry = geometry
        self.shapes = sorted(shapes)
        self.eager_shapes = eager_shapes(geometry, self.shapes[-1], eager_tokens)
        self._kernels, self._streams, self._events = kernels, streams, events
        self._sm_count = sm_count
        self._plans = plans or {}
        self._owned = memory is None
        self.memory = arena_memory([geometry], shapes, eager_tokens) if memory is None else memory
        self._runnables: dict[Variant, Runnable] = {}

    def variants(self) -> list[Variant]:
        """Every variant, the largest first."""
        with_lora = (False, True) if self.geometry.max_loras else (False,)
        sizes = [*reversed(self.eager_shapes), *reversed(self.shapes)]
        return [Variant(size, routing, lora) for size in sizes for routing in RoutingInput for lora in with_lora]

    def kernels_asked(self) -> list[Specialisation]:
        """The kernels that ``prepare`` will ask for: what its programs ask for when they are built without any."""
        asked = AskedKernels()
        for variant in self.variants():
            way = self._way(variant)
            self._programmed(variant, way.plan, asked, wide=way.wide)
        return list(asked.specialisations.values())

    def prepare(self, progress: Progress | None = None) -> None:
        """Build the program of every variant and capture those of decode shapes, the largest first."""
        variants = self.variants()
        for done, variant in enumerate(variants):
            if progress:
                progress("capturing graphs", done, len(variants))
            way = self._way(variant)
            self._runnables[variant] = self.build(variant, way.plan, captured=way.captured, wide=way.wide)
        if progress:
            progress("capturing graphs", len(variants), len(variants))

    def build(
        self,
        variant: Variant,
        plan: Plan,
        *,
        captured: bool,
        delays: Mapping[str, int] | None = None,
        apart: bool = False,
        wide: bool = True,
    ) -> Runnable:
        """A runnable of ``variant`` under ``plan``, apart from those of the pool; tests compare such. ``wide``: by wide
        GEMMs where those are the faster."""
        launches, program = self._programmed(variant, plan, self._kernels, delays=delays, apart=apart, wide=wide)
        graph = capture(self._streams, program.run, str(variant)) if captured else None
        return Runnable(variant, launches.arena, program, graph, launches.wide)

    def _way(self, variant: Variant) -> _Way:
        """Decode shapes with adapters have no wide GEMMs: their bits are those of smaller batches and of every plan."""
        captured = variant.num_tokens not in self.eager_shapes
        plan = self._plans[variant.num_tokens] if captured else EAGER_PLAN
        return _Way(plan, captured, not (captured and variant.lora))

    def _programmed(
        self,
        variant: Variant,
        plan: Plan,
        kernels: KernelSource,
        *,
        delays: Mapping[str, int] | None = None,
        apart: bool = False,
        wide: bool,
    ) -> tuple[Launches, Program]:
        lora, fused = variant.lora, plan is Plan.FUSED or not variant.lora
        buffers = plan_buffers(self.geometry, variant.num_tokens, lora=lora, apart=not fused)
        launches = Launches(
            self.geometry,
            variant.num_tokens,
            variant.routing,
            variant.lora,
            Arena(buffers, self.memory),
            kernels,
            self._sm_count,
            apart,
            wide=wide and fused and self.geometry.wide_tile(variant.num_tokens, lora=lora) is not None,
        )
        return launches, build_program(launches, self._streams, self._events, plan, delays)

    def runnable(self, num_tokens: int, routing: RoutingInput, lora: bool) -> Runnable:
        """The smallest prepared variant that holds ``num_tokens``."""
        shapes = self.shapes if num_tokens <= self.shapes[-1] else self.eager_shapes
        size = shapes[bisect_left(shapes, num_tokens)]
        return self._runnables[Variant(size, routing, lora)]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest shape: more run in parts of this."""
        return self.eager_shapes[-1]

    @property
    def graph_bytes(self) -> int:
        """GPU memory that the graphs took beside the arena."""
        return sum(runnable.graph.footprint_bytes for runnable in self._runnables.values() if runnable.graph)

    def close(self) -> None:
        """Destroy the graphs and free the memory."""
        for runnable in self._runnables.values():
            if runnable.graph is not None:
                runnable.graph.destroy()
        if self._owned:
            self.memory.close()


def arena_memory(geometries: Iterable[Geometry], shapes: Sequence[int], eager_tokens: int) -> DeviceBuffer:
    """One allocation that the arena of any shape of any of ``geometries`` fits into: not always the largest shape's, of
    which tiles and adapter groups may be larger and fewer."""
    return shared_memory(
        [
            plan_buffers(geometry, tokens, lora=geometry.max_loras > 0, apart=tokens in shapes)
            for geometry in geometries
            for tokens in (*shapes, *eager_shapes(geometry, max(shapes), eager_tokens))
        ]
    )


def _growing_shapes() -> Iterator[int]:
    """From ``SMALLEST_EAGER`` on, each twice the one before; up to ``MLP_TOKENS``, where kernels differ most with the
    load, one between each two."""
    for tokens in (SMALLEST_EAGER << i for i in count()):
        yield tokens
        if tokens < MLP_TOKENS:
            yield tokens * 3 // 2


def eager_shapes(geometry: Geometry, decode_limit: int, eager_tokens: int) -> list[int]:
    """The shapes of batches above the decode limit, ascending: each has kernels of its own for its load.

    The largest is ``eager_tokens``, or half as many, and so on, where the sort of a shape would not fit: with far more
    experts and adapter slots than usual.
    """
    between = takewhile(lambda tokens: tokens < eager_tokens, _growing_shapes())
    shapes = [*(tokens for tokens in between if tokens > decode_limit), eager_tokens]
    if all(geometry.sorts(tokens) for tokens in shapes) or eager_tokens <= decode_limit + 1:
        return shapes
    return eager_shapes(geometry, decode_limit, max(eager_tokens // 2, decode_limit + 1))
