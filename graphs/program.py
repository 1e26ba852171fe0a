"""The layer as a list of launches and event operations: the same list runs eagerly and under capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from .buffers import RoutingInput
from .geometry import WIDE_ABOVE
from .kernel import PreparedLaunch
from .launches import Launches
from .lora_launches import DOWN, GATE_UP
from .streams import Event, Events, Stream, Streams

Step = Callable[[], None]


class Plan(StrEnum):
    """What runs where; every plan gives the same bits, but for wide GEMMs with adapters above the decode limit.

    ``SINGLE_STREAM``            shrink and expand one after the other, before the GEMM or before finalize
    ``TWO_STREAM``               those of gate_up on the side stream, beside the gate_up GEMM
    ``TWO_STREAM_OVERLAP_DOWN``  those of down too, beside the down GEMM, and finalize behind them
    ``FUSED``                    one stream; the GEMMs expand as they finish a tile, and where experts have few tokens
                                 each, both of them and the shrinks are one kernel
    """

    SINGLE_STREAM = "single_stream"
    TWO_STREAM = "two_stream"
    TWO_STREAM_OVERLAP_DOWN = "two_stream_overlap_down"
    FUSED = "fused"

    @property
    def keeps_delta_apart(self) -> bool:
        """Whether LoRA deltas are buffers of their own, added by the activation and by finalize."""
        return self is not Plan.FUSED


@dataclass(frozen=True, slots=True)
class Program:
    """A forward of one captured shape: ``run`` puts all of it on the streams, in order.

    ``launches`` are the kernels among the steps, in order, for people and for tests.
    """

    plan: Plan
    steps: tuple[Step, ...]
    launches: tuple[PreparedLaunch, ...]

    def run(self) -> None:
        """Launch everything. Raises ``DriverError`` or ``EngineFailedError``."""
        for step in self.steps:
            step()


class _Builder:
    """Collects steps; ``delays`` (cycles by stream name) puts a spin before every kernel of a stream."""

    def __init__(self, launches: Launches, streams: Streams, events: Events, delays: Mapping[str, int]) -> None:
        self.make = launches
        self.main, self.side = streams.main, streams.side
        self.events = events
        self._delays = delays
        self._steps: list[Step] = []
        self._launches: list[PreparedLaunch] = []

    def launch(self, prepared: PreparedLaunch) -> None:
        delay = self._delays.get(prepared.stream.name, 0)
        for one in (self.make.spin(prepared.stream, delay), prepared) if delay else (prepared,):
            self._steps.append(one.launch)
            self._launches.append(one)

    def record(self, event: Event, stream: Stream) -> None:
        self._steps.append(lambda: event.record(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        self._steps.append(lambda: stream.wait(event))

    def order(self, first: Stream, event: Event, then: Stream) -> None:
        """What comes next on ``then`` follows all that is on ``first``."""
        self.record(event, first)
        self.wait(then, event)

    def program(self, plan: Plan) -> Program:
        return Program(plan, tuple(self._steps), tuple(self._launches))


def build_program(
    launches: Launches, streams: Streams, events: Events, plan: Plan, delays: Mapping[str, int] | None = None
) -> Program:
    """The program of ``launches``' shape under ``plan``; without LoRA there is one stream whatever the plan."""
    build = _Builder(launches, streams, events, delays or {})
    _route(build)
    if launches.wide:
        _wide(build)
        return build.program(Plan.FUSED)
    fused = plan is Plan.FUSED or not launches.lora
    if fused and launches.token_config:
        build.launch(build.make.few_sort(build.main))
    else:
        build.launch(build.make.sort(build.main, fused=fused))
    if not (fused and (launches.direct or launches.mlp)):
        many = fused and launches.num_tokens > WIDE_ABOVE
        build.launch((build.make.wide_gather if many else build.make.gather)(build.main))
    if fused:
        _fused(build)
    elif plan is Plan.SINGLE_STREAM:
        _single_stream(build)
    else:
        _two_stream(build, overlap_down=plan is Plan.TWO_STREAM_OVERLAP_DOWN)
    return build.program(plan if launches.lora else Plan.FUSED)


def _route(build: _Builder) -> None:
    make = build.make
    if make.routing is RoutingInput.GATE or make.geometry.shared_gated:
        build.launch(make.gate(build.main))
    if make.routing is not RoutingInput.TOPK:
        build.launch(make.route(build.main))


def _fused(build: _Builder) -> None:
    """One chain of programmatic launches; without LoRA it is the base layer. What reads the weights of gate_up starts
    with the sort, unless it follows a gather.
    """
    make, main = build.make, build.main
    if make.token_config:
        build.launch(make.token_mlp(main))
        build.record(build.events.gemm2_done, main)
        return
    if make.mlp:
        build.launch(make.expert_mlp(main))
    else:
        _one_by_one(build)
    build.record(build.events.gemm2_done, main)
    build.launch(make.finalize(main, fused=True))


def _one_by_one(build: _Builder) -> None:
    """The products as kernels of their own, each behind its shrink."""
    make, main = build.make, build.main
    if make.lora:
        build.launch(make.lora_shrink(main, GATE_UP, programmatic=True))
    build.launch(make.gate_up_gemm(main, fused=True))
    if make.lora:
        build.launch(make.lora_shrink(main, DOWN, programmatic=True))
    build.launch(make.down_gemm(main, fused=True))


def _wide(build: _Builder) -> None:
    """``_fused`` for many tokens: the gather shrinks what it gathers."""
    make, main = build.make, build.main
    build.launch(make.sort(main, fused=True))
    build.launch(make.wide_gather_shrink(main) if make.lora else make.wide_gather(main))
    build.launch(make.gate_up_gemm(main, fused=True))
    if make.lora:
        build.launch(make.wide_shrink(main))
    build.launch(make.down_gemm(main, fused=True))
    build.record(build.events.gemm2_done, main)
    build.launch(make.finalize(main, fused=True))


def _single_stream(build: _Builder) -> None:
    make, main = build.make, build.main
    _lora(build, main, GATE_UP)
    build.launch(make.gate_up_gemm(main, fused=False))
    build.launch(make.activation(main))
    build.launch(make.down_gemm(main, fused=False))
    build.record(build.events.gemm2_done, main)
    _lora(build, main, DOWN)
    build.launch(make.finalize(main, fused=False))


def _two_stream(build: _Builder, *, overlap_down: bool) -> None:
    make, main, side, events = build.make, build.main, build.side, build.events
    build.order(main, events.forked, side)
    _lora(build, side, GATE_UP)
    build.launch(make.gate_up_gemm(main, fused=False))
    build.order(side, events.lora_ready, main)
    build.launch(make.activation(main))
    if not overlap_down:
        build.launch(make.down_gemm(main, fused=False))
        build.record(events.gemm2_done, main)
        _lora(build, main, DOWN)
        build.launch(make.finalize(main, fused=False))
        return
    build.order(main, events.activation_ready, side)
    _lora(build, side, DOWN)
    build.launch(make.down_gemm(main, fused=False))
    # The side stream owns the sum: it has the down delta, and waits here for the down output.
    build.order(main, events.gemm2_done, side)
    build.launch(make.finalize(side, fused=False))
    build.order(side, events.joined, main)


def _lora(build: _Builder, stream: Stream, projections: int) -> None:
    build.launch(build.make.lora_shrink(stream, projections))
    build.launch(build.make.lora_expand(stream, projections))
