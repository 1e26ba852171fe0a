"""Times the kernels of one layer forward one by one, by what each adds to the kernels before it.

A kernel is not timed alone, because alone it is another: the GEMMs take tiles by a ticket that the sort sets to zero,
and start, under programmatic dependent launch, while the kernel before them ends. So the first n launches of every
forward are captured for each n, as ``bench layer`` captures all of them, and a row is the difference between the
median of n and that of n - 1. The rows of a forward add up to its time; one that hides behind its predecessor costs
little, and the first row holds the replay's own start. The ends of differences of two medians are those of the longer.

GB/s are the weights or adapter matrices that the kernel must read (``floor.py``) over that difference, B among them
where a GEMM adds the delta itself; kernels that only move activations, which lie in L2, have none.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from moelet.graphs.kernel import PreparedLaunch
from moelet.graphs.program import Plan
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import ConfigurationError
from moelet.layer.spec import LayerSpec

from . import options
from .floor import Hits, matrix_bytes
from .forwards import Forwards, WeightSet, forwards_per_graph
from .measurement import geometry_of, workloads
from .report import Results, Row, Table, circumstances, fixed
from .rig import Rig
from .workload import Workload, random_batches

TOKENS = (1, 16, 64, 256)
MATRICES = {
    "gate_up_gemm": ("gate_up",),
    "down_gemm": ("down",),
    "lora_shrink of gate_up": ("a_gate_up",),
    "gather and lora_shrink of gate_up": ("a_gate_up",),
    "lora_expand of gate_up": ("b_gate_up",),
    "lora_shrink of down": ("a_down",),
    "lora_expand of down": ("b_down",),
}
"""The matrices that a launch reads, by its label, where the delta is kept apart."""
FUSED_MATRICES = MATRICES | {
    "gate_up_gemm": ("gate_up", "b_gate_up"),
    "down_gemm": ("down", "b_down"),
    "expert_mlp": ("gate_up", "a_gate_up", "b_gate_up", "down", "a_down", "b_down"),
    "token_mlp": ("gate_up", "a_gate_up", "b_gate_up", "down", "a_down", "b_down"),
}
"""The same where the GEMMs add the delta, or one kernel does all."""
TABLE = Table("T:5 LoRA:13 kernel:24 us:7 MB:8 GB/s:6 so-far:7")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench kernels", description=(__doc__ or "").split("\n")[0])
    options.shape_options(made)
    work = made.add_argument_group("work")
    options.workload_options(work)
    options.one_plan_option(work)
    options.run_options(made, tokens=TOKENS)
    return made


def kernel_rows(
    rig: Rig, chosen: argparse.Namespace, spec: LayerSpec, workload: Workload, sets: Sequence[WeightSet]
) -> Iterator[Row]:
    """A row for each launch of one forward of ``workload``, in order."""
    batches = random_batches(
        spec, workload, forwards_per_graph(spec, workload.num_tokens), sets[0].layer.geometry.max_loras
    )
    forwards = Forwards(rig, sets[0].layer.geometry, workload, Plan(chosen.plan), sets, batches)
    launches = forwards.programs[0].launches
    check_one_stream(launches)
    matrices = mean_bytes(spec, workload, batches)
    read = MATRICES if forwards.plan.keeps_delta_apart else FUSED_MATRICES
    before = 0.0
    for number, launch in enumerate(launches, start=1):
        replay = partial(forwards.capture(number).launch, rig.streams.main)
        timing = rig.time(replay, replays=chosen.replays, forwards=forwards.count)
        added, before = timing.median - before, timing.median
        yield {
            "tokens": workload.num_tokens,
            "routing": workload.routing.value,
            "rank": workload.rank,
            "adapters": workload.adapters,
            "plan": forwards.plan.value,
            "kernel": launch.label,
            "us": round(added, 2),
            "up_to_here": timing.row(),
            **speed(bytes_of(read.get(launch.label, ()), matrices), added),
        }
    forwards.close()


def check_one_stream(launches: Sequence[PreparedLaunch]) -> None:
    """Raise ``ConfigurationError`` unless all ``launches`` follow each other: else their parts cannot be told apart."""
    if {launch.stream.name for launch in launches} != {"main"}:
        raise ConfigurationError("kernels are timed where all run on one stream: use --plan fused or single_stream")


def mean_bytes(spec: LayerSpec, workload: Workload, batches: Sequence[LayerBatch]) -> dict[str, float]:
    """Bytes of each matrix, on average over the routings of ``batches``."""
    counted = [matrix_bytes(spec, Hits.of(spec, batch), workload.rank) for batch in batches]
    return {name: sum(matrices[name] for matrices in counted) / len(counted) for name in counted[0]}


def bytes_of(names: Sequence[str], matrices: Mapping[str, float]) -> float | None:
    """Bytes of the matrices ``names``, None of none."""
    return sum(matrices[name] for name in names) if names else None


def speed(num_bytes: float | None, microseconds: float) -> Row:
    """Bytes and GB/s of a launch as its row holds them."""
    if num_bytes is None or microseconds <= 0.0:
        return {"bytes": None if num_bytes is None else round(num_bytes), "gb_s": None}
    return {"bytes": round(num_bytes), "gb_s": round(num_bytes / microseconds * 1e-3, 1)}


def line(row: Row) -> str:
    """A row of the table on the terminal."""
    lora = f"r{row['rank']} x{row['adapters']}" if row["rank"] else None
    megabytes = None if row["bytes"] is None else row["bytes"] * 1e-6
    cells = [row["tokens"], lora, row["kernel"], fixed(row["us"], 2), fixed(megabytes, 2), fixed(row["gb_s"], 0)]
    return TABLE.line([*cells, fixed(row["up_to_here"]["us"])])


def main(arguments: Sequence[str]) -> int:
    """Measure; the exit code 0."""
    chosen = parser().parse_args(arguments)
    options.check(chosen)
    layers = options.chosen_shapes(chosen)
    rig = Rig(chosen.gpu)
    results = Results(circumstances("kernels", arguments, rig, chosen.commit), chosen.json)
    print(f"{rig.device.name}, read bandwidth {rig.bandwidth * 1e-12:.3f} TB/s, times in us")
    for name, spec in layers.items():
        print(f"\n{name}\n{TABLE.heading}", flush=True)
        results.start(name)
        geometry = geometry_of(spec, chosen)
        sets = [WeightSet(rig, spec, geometry, seed) for seed in range(chosen.sets)]
        for rank in chosen.ranks:
            if rank:
                for each in sets:
                    each.install(geometry.max_loras, rank, shared_outer=False)
            for workload in workloads(chosen, rank, shared_outer=False):
                for row in list(kernel_rows(rig, chosen, spec, workload, sets)):  # a forward whole, or nothing of it
                    results.add({"shape": name, **row})
                    print(line(row), flush=True)
        for each in sets:
            each.close()
    rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
