"""The program that ``moelet bench counters`` runs under ncu: one forward of each workload between cuProfilerStart and
cuProfilerStop, and a file that says what those forwards were.

A forward is the first of those that ``bench layer`` has in its graph, captured alone and replayed once. Its output is
read afterwards and held to float64, so that what was counted is known to have computed the layer.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from moelet.graphs.driver import call, driver
from moelet.graphs.program import Plan
from moelet.layer.spec import LayerSpec

from . import options
from .counters import parser as counters_parser
from .floor import MATRICES
from .forwards import Forwards, WeightSet
from .kernels import FUSED_MATRICES, bytes_of, check_one_stream, mean_bytes
from .kernels import MATRICES as APART_MATRICES
from .measurement import costs, geometry_of, judged, workloads
from .report import Row, write
from .rig import Rig
from .workload import Workload, random_batches, relative_error


def parser() -> argparse.ArgumentParser:
    """The command line of ``moelet bench counters``, with which of its shapes to run and where to say what was run."""
    made = counters_parser()
    made.add_argument("--only", required=True, help="the shape to run")
    made.add_argument("--manifest", type=Path, required=True, help="the file to write")
    return made


def counted_forwards(rig: Rig, chosen: argparse.Namespace, spec: LayerSpec) -> Iterator[Row]:
    """Run every workload once under the profiler; a setting with its kernels for each."""
    weights = WeightSet(rig, spec, geometry_of(spec, chosen), seed=0)
    for rank in chosen.ranks:
        if rank:
            weights.install(weights.layer.geometry.max_loras, rank, shared_outer=False)
        for workload in workloads(chosen, rank, shared_outer=False):
            yield counted(rig, chosen, workload, weights)
    weights.close()


def counted(rig: Rig, chosen: argparse.Namespace, workload: Workload, weights: WeightSet) -> Row:
    """Run one forward of ``workload`` under the profiler, and say what it was, must read, launched and gave."""
    spec, geometry = weights.spec, weights.layer.geometry
    batches = random_batches(spec, workload, 1, geometry.max_loras)
    forwards = Forwards(rig, geometry, workload, Plan(chosen.plan), [weights], batches)
    launches = [launch for program in forwards.programs for launch in program.launches]
    check_one_stream(launches)
    replay_profiled(rig, forwards)
    matrices = mean_bytes(spec, workload, batches)
    read = APART_MATRICES if forwards.plan.keeps_delta_apart else FUSED_MATRICES
    error = relative_error(forwards.outputs()[0], weights.exact_output(batches[0])) if chosen.check else None
    setting = {
        "tokens": workload.num_tokens,
        "routing": workload.routing.value,
        "rank": workload.rank,
        "adapters": workload.adapters,
        "layout": workload.layout,
        "slot_rank": geometry.max_lora_rank if workload.lora else None,
        "plan": forwards.plan.value,
        **judged(error),
        **costs(spec, workload, batches),
        "floor_bytes": round(sum(matrices[name] for name in MATRICES)),
    }
    kernels = [
        {
            "kernel": launch.label,
            "function": launch.kernel.name,
            "kernel_floor_bytes": whole(bytes_of(read.get(launch.label, ()), matrices)),
        }
        for launch in launches
    ]
    forwards.close()
    return {"setting": setting, "kernels": kernels}


def whole(num_bytes: float | None) -> int | None:
    """``num_bytes`` as a whole number, which those of one batch are."""
    return None if num_bytes is None else round(num_bytes)


def replay_profiled(rig: Rig, forwards: Forwards) -> None:
    """Capture and replay once while the profiler looks."""
    call(driver.cuProfilerStart)
    forwards.capture().launch(rig.streams.main)
    rig.streams.main.synchronize()
    call(driver.cuProfilerStop)


def main(arguments: Sequence[str]) -> int:
    """Run the forwards; the exit code 0."""
    chosen = parser().parse_args(arguments)
    options.check(chosen)
    spec = options.chosen_shapes(chosen)[chosen.only]
    rig = Rig(chosen.gpu)
    rig.reader.close()  # ncu puts all memory aside for every kernel
    write(chosen.manifest, {"settings": list(counted_forwards(rig, chosen, spec))})
    rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
