"""Times a forward as a client of the engine meets it: hidden states in host memory to output in host memory.

``GraphEngine`` is called over batches and layers in turn, so that L2 serves no weights, and timed by the host's clock
around each call; beside it stands the time of the graph alone, measured as ``bench layer`` does under the plan that the
engine chose. The difference is copies, launch and Python. ``begin`` is the part of a call until the forward was begun,
and ``ahead`` the time for each when every call is begun before the one ahead of it is waited for, as the service does
under load. ``memory`` says where hidden states are: in pageable memory, as a caller has them who does nothing for it,
or pinned, in page-locked memory, as the service has them of a request alone.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moelet.graphs.engine import GraphEngine
from moelet.graphs.memory import PinnedBuffer
from moelet.graphs.options import GraphOptions
from moelet.graphs.program import Plan
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec, ModelSpec

from . import options
from .forwards import Forwards, WeightSet, forwards_per_graph
from .measurement import geometry_of, workloads
from .report import Results, Row, Table, circumstances, fixed
from .rig import Rig
from .timing import Timing
from .workload import Workload, on_host, random_batches

TOKENS = (1, 16, 64, 256)
WARM_UP = 8
MEMORIES = ("pageable", "pinned")
"""Where hidden states are, in the order measured."""
TABLE = Table("T:5 LoRA:13 memory:10 host:8 p10:8 p90:8 begin:8 graph:8 beside:8 ahead:8 plan:23")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench host", description=(__doc__ or "").split("\n")[0])
    options.shape_options(made)
    work = made.add_argument_group("work")
    options.workload_options(work)
    options.run_options(made, tokens=TOKENS)
    made.add_argument("--calls", type=options.replays, default=300, help="timed calls of the engine (300)")
    return made


def open_engine(chosen: argparse.Namespace, sets: Sequence[WeightSet]) -> GraphEngine:
    """An engine that serves every set as a layer, its decode shapes those asked for."""
    layers = {each.spec.index: each.spec for each in sets}
    model = ModelSpec(
        name="random", model_type="random", path=Path("random"), num_hidden_layers=len(layers), layers=layers
    )
    geometry = sets[0].layer.geometry
    limit = GraphOptions().max_decode_tokens
    decode = [tokens for tokens in chosen.tokens if tokens <= limit]
    settings = GraphOptions(
        max_loras=geometry.max_loras,
        max_lora_rank=geometry.max_lora_rank,
        max_decode_tokens=max(decode, default=limit),
        decode_shapes=decode,
    )
    engine = GraphEngine(model, settings, ordinal=chosen.gpu)
    for each in sets:
        engine.add_layer(each.spec.index, each.engine_weights)
    engine.start()
    return engine


def install(engine: GraphEngine, sets: Sequence[WeightSet]) -> None:
    """Put the sets' adapters into the engine's slots, each adapter over all layers."""
    for slot, adapter in enumerate(sets[0].adapters):
        layers = {each.spec.index: each.adapters[slot].layers[each.spec.index] for each in sets}
        engine.install_adapter(slot, on_host(replace(adapter, layers=layers)))


def host_times(engine: GraphEngine, batches: Sequence[LayerBatch], calls: int) -> tuple[list[float], list[float]]:
    """Microseconds of each of ``calls`` calls of the engine, over ``batches`` in turn: whole, and until begun."""
    times, begins = [], []
    for number in range(WARM_UP + calls):
        batch = batches[number % len(batches)]
        start = time.perf_counter()
        forward = engine.begin(batch)
        begun = time.perf_counter()
        forward.result()
        times.append((time.perf_counter() - start) * 1e6)
        begins.append((begun - start) * 1e6)
    return times[WARM_UP:], begins[WARM_UP:]


def time_ahead(engine: GraphEngine, batches: Sequence[LayerBatch], calls: int) -> float:
    """Microseconds for each of ``calls`` calls that are begun while the one ahead of them computes."""
    ahead = engine.begin(batches[0])
    start = time.perf_counter()
    for number in range(1, calls + 1):
        behind = engine.begin(batches[number % len(batches)])
        ahead.result()
        ahead = behind
    ahead.result()
    return (time.perf_counter() - start) * 1e6 / calls


def plan_of(engine: GraphEngine, workload: Workload) -> Plan:
    """The plan that the engine runs ``workload`` under."""
    rows = engine.plans(0)
    plan = next((row["plan"] for row in rows if row["tokens"] >= workload.num_tokens), rows[-1]["plan"])
    return Plan(plan) if workload.lora else Plan.FUSED


@contextmanager
def placed(batches: Sequence[LayerBatch], memory: str) -> Iterator[Sequence[LayerBatch]]:
    """``batches`` with their hidden states in ``memory``, one of ``MEMORIES``."""
    if memory == "pageable":
        yield batches
        return
    pinned = [PinnedBuffer(batch.hidden_states.nbytes) for batch in batches]
    yield [
        replace(
            batch,
            hidden_states=buffer.tensor(torch.bfloat16, tuple(batch.hidden_states.shape)).copy_(batch.hidden_states),
        )
        for batch, buffer in zip(batches, pinned, strict=True)
    ]
    for buffer in pinned:
        buffer.close()


def measured(
    rig: Rig, engine: GraphEngine, chosen: argparse.Namespace, workload: Workload, sets: Sequence[WeightSet]
) -> Iterator[Row]:
    """A row for each of ``MEMORIES``: the engine's calls, and the graph alone."""
    spec, geometry = sets[0].spec, sets[0].layer.geometry
    batches = random_batches(spec, workload, forwards_per_graph(spec, workload.num_tokens), geometry.max_loras)
    layered = [replace(batch, layer=index % len(sets)) for index, batch in enumerate(batches)]
    forwards = Forwards(rig, geometry, workload, plan_of(engine, workload), sets, batches)
    replay = partial(forwards.capture().launch, rig.streams.main)
    graph = rig.time(replay, replays=chosen.replays, forwards=forwards.count)
    for memory in MEMORIES:
        with placed(layered, memory) as there:
            times, begins = host_times(engine, there, chosen.calls)
            ahead = time_ahead(engine, there, chosen.calls)
        calls = Timing.of(times)
        yield {
            "tokens": workload.num_tokens,
            "plan": forwards.plan.value,
            "routing": workload.routing.value,
            "rank": workload.rank,
            "adapters": workload.adapters,
            "memory": memory,
            "calls": chosen.calls,
            **calls.row(),
            "begin_us": round(Timing.of(begins).median, 2),
            "graph_us": round(graph.median, 2),
            "beside_graph_us": round(calls.median - graph.median, 2),
            "ahead_us": round(ahead, 2),
        }
    forwards.close()


def line(row: Row) -> str:
    """A row of the table on the terminal."""
    lora = f"r{row['rank']} x{row['adapters']}" if row["rank"] else None
    names = ("us", "p10_us", "p90_us", "begin_us", "graph_us", "beside_graph_us", "ahead_us")
    times = [fixed(row[name]) for name in names]
    return TABLE.line([row["tokens"], lora, row["memory"], *times, row["plan"]])


def rows(rig: Rig, chosen: argparse.Namespace, spec: LayerSpec) -> Iterator[Row]:
    """All rows of one layer."""
    geometry = geometry_of(spec, chosen)
    sets = [WeightSet(rig, replace(spec, index=index), geometry, index) for index in range(chosen.sets)]
    engine = open_engine(chosen, sets)
    for rank in chosen.ranks:
        if rank:
            for each in sets:
                each.install(geometry.max_loras, rank, shared_outer=False)
            install(engine, sets)
        for workload in workloads(chosen, rank, shared_outer=False):
            yield from measured(rig, engine, chosen, workload, sets)
    engine.close()
    for each in sets:
        each.close()


def main(arguments: Sequence[str]) -> int:
    """Measure; the exit code 0."""
    chosen = parser().parse_args(arguments)
    options.check(chosen)
    layers = options.chosen_shapes(chosen)
    rig = Rig(chosen.gpu)
    head = circumstances("host", arguments, rig, chosen.commit)
    results = Results(head, chosen.json)
    print(f"{rig.device.name}, times in us, host clock: median of {chosen.calls} calls")
    for name, spec in layers.items():
        print(f"\n{name}\n{TABLE.heading}", flush=True)
        results.start(name)
        for row in rows(rig, chosen, spec):
            results.add({"shape": name, **row})
            print(line(row), flush=True)
    rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
