"""Complete weight sets, and several forwards over them in one captured graph, each with memory of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moelet.graphs.adapters import AdapterSlots, SlotBank
from moelet.graphs.arena import Arena
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.capture import CapturedGraph, capture
from moelet.graphs.geometry import Geometry
from moelet.graphs.options import MAX_EAGER_TOKENS, GraphOptions
from moelet.graphs.plan_choice import choose
from moelet.graphs.pool import EAGER_PLAN, GraphPool, Variant
from moelet.graphs.program import Plan, Program
from moelet.graphs.residency import ResidentLayer
from moelet.graphs.staging import Staging
from moelet.graphs.transfer import Transfer
from moelet.layer.adapter import Adapter
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec

from .floor import expected_experts, expert_bytes
from .rig import Rig
from .workload import Workload, exact_output, on_host, random_adapter, random_weights

CYCLE_BYTES = 250_000_000
"""What one replay should move at least, several times L2, so that nothing of it serves the next."""
MOST_FORWARDS = 32


def forwards_per_graph(spec: LayerSpec, num_tokens: int) -> int:
    """Forwards in one graph: 8, 4 or 2 by their length, more where they move too little to empty L2."""
    count = 8 if num_tokens <= 32 else 4 if num_tokens <= 256 else 2
    moved = expected_experts(spec, num_tokens) * expert_bytes(spec)
    while count < MOST_FORWARDS and count * moved < CYCLE_BYTES:
        count *= 2
    return count


def engine_plan(gpu: str, geometry: Geometry, num_tokens: int) -> Plan:
    """The plan that an engine with default options runs a LoRA batch of ``num_tokens`` under."""
    return choose(gpu, geometry, num_tokens).plan if num_tokens <= GraphOptions().max_decode_tokens else EAGER_PLAN


class WeightSet:
    """One layer with weights of its own, as torch sees them and packed as kernels do, and its adapter slots.

    ``weights`` lie where torch checks outputs; ``engine_weights`` are the same with the small ones on the host, which
    is how an engine takes them.
    """

    def __init__(self, rig: Rig, spec: LayerSpec, geometry: Geometry, seed: int) -> None:
        self.spec = spec
        self.adapters: list[Adapter] = []
        self._random = torch.Generator(rig.torch_device).manual_seed(seed)
        self.weights = random_weights(spec, self._random)
        gate = self.weights.shared_gate
        self.engine_weights = replace(self.weights, shared_gate=None if gate is None else gate.cpu())
        self.layer = ResidentLayer(spec, geometry, self.engine_weights, rig.device.ordinal)
        self._bank: SlotBank | None = None
        if geometry.max_loras:
            slots = AdapterSlots(spec, geometry)
            slots.fill_args(self.layer.args)
            self._bank = SlotBank({spec.index: slots}, geometry.max_lora_rank, rig.streams.copy)

    def install(self, count: int, rank: int, *, shared_outer: bool) -> None:
        """Fill the first ``count`` slots with adapters of ``rank``."""
        assert self._bank is not None
        make = random_adapter
        self.adapters = [make(self.spec, rank, self._random, shared_outer=shared_outer) for _ in range(count)]
        for slot, adapter in enumerate(self.adapters):
            self._bank.install(slot, on_host(adapter))

    def exact_output(self, batch: LayerBatch) -> Tensor:
        """The float64 output of ``batch`` on the host."""
        return exact_output(self.spec, self.weights, self.adapters, batch)

    def close(self) -> None:
        """Free what is packed."""
        self.layer.close()
        if self._bank is not None:
            self._bank.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """A forward, or as much of one as an engine runs at once."""

    batch: LayerBatch
    weights: WeightSet
    pool: GraphPool
    arena: Arena
    transfer: Transfer
    program: Program


class Forwards:
    """One forward for each of ``batches``, in turn over ``sets``, recorded one after another into one graph.

    Memory is poisoned before the inputs are written. A batch larger than what an engine runs at once is run in parts.
    """

    def __init__(
        self,
        rig: Rig,
        geometry: Geometry,
        workload: Workload,
        plan: Plan,
        sets: Sequence[WeightSet],
        batches: Sequence[LayerBatch],
    ) -> None:
        self._rig, self._geometry, self._workload, self._plan = rig, geometry, workload, plan
        self._parts: list[list[_Part]] = []
        self._staging = Staging(geometry, min(workload.num_tokens, MAX_EAGER_TOKENS))
        for index, batch in enumerate(batches):
            weights, tokens = sets[index % len(sets)], batch.num_tokens
            starts = range(0, tokens, MAX_EAGER_TOKENS)
            self._parts.append([self._part(batch.part(s, min(s + MAX_EAGER_TOKENS, tokens)), weights) for s in starts])
        self._graphs: list[CapturedGraph] = []

    def _part(self, batch: LayerBatch, weights: WeightSet) -> _Part:
        rig, tokens = self._rig, batch.num_tokens
        pool = GraphPool(
            self._geometry,
            [tokens],
            tokens,
            kernels=rig.kernels,
            streams=rig.streams,
            events=rig.events,
            sm_count=rig.device.sm_count,
        )
        variant = Variant(tokens, RoutingInput.TOPK, self._workload.lora)
        built = pool.build(variant, self._plan, captured=False)
        main = rig.streams.main
        built.arena.poison(main)
        transfer = self._staging.transfer(variant, built.arena, tokens)
        self._staging.send(batch, weights.layer.head, transfer, main)
        main.synchronize()
        return _Part(batch, weights, pool, built.arena, transfer, built.program)

    @property
    def count(self) -> int:
        """Forwards in the graph."""
        return len(self._parts)

    @property
    def plan(self) -> Plan:
        """The plan that the programs came out with."""
        return self._parts[0][0].program.plan

    @property
    def programs(self) -> list[Program]:
        """The programs of all forwards, in order."""
        return [part.program for parts in self._parts for part in parts]

    def capture(self, launches: int | None = None) -> CapturedGraph:
        """All forwards as one graph, or only the first ``launches`` of each, which must all be on the main stream."""

        def record() -> None:
            for program in self.programs:
                if launches is None:
                    program.run()
                else:
                    for launch in program.launches[:launches]:
                        launch.launch()

        self._graphs.append(capture(self._rig.streams, record, f"{self.count} of {self._workload.num_tokens} tokens"))
        return self._graphs[-1]

    def outputs(self) -> list[Tensor]:
        """The output of each forward after a replay, bf16 ``[T, H]`` on the host."""
        main, staging = self._rig.streams.main, self._staging
        return [torch.cat([staging.receive(part.transfer, main) for part in parts]) for parts in self._parts]

    def close(self) -> None:
        """Free graphs and memory."""
        for graph in self._graphs:
            graph.destroy()
        for parts in self._parts:
            for part in parts:
                part.pool.close()
        self._staging.close()
