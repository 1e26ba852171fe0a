"""Times one layer forward of the CPU engine, checks it against float64 and writes a dated row of JSON."""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.engine import LayerBatch
from moelet.layer.oracle import layer_forward
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import LayerSpec, ModelSpec
from moelet.layer.weights import LayerWeights

from . import options
from .report import unused

ROOT = Path(__file__).resolve().parents[1]
LARGEST_ERROR_RATIO = 1.1
SHAPES = {
    "qwen3-30b-a3b": LayerSpec(index=0, hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8),
    "small": LayerSpec(index=0, hidden_size=256, intermediate_size=96, num_experts=16, top_k=4),
}


def normal(generator: torch.Generator, *shape: int, scale: float) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, scale, generator=generator)


def random_weights(spec: LayerSpec, g: torch.Generator) -> LayerWeights:
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
    return LayerWeights(
        gate_up=normal(g, experts, 2 * width, hidden, scale=hidden**-0.5),
        down=normal(g, experts, hidden, width, scale=width**-0.5),
        router=normal(g, experts, hidden, scale=hidden**-0.5),
    )


def random_lora(g: torch.Generator, experts: int, rank: int, wide: int, out: int) -> LoraWeights:
    return LoraWeights(
        a=normal(g, experts, rank, wide, scale=wide**-0.5),
        b=normal(g, experts, out, rank, scale=rank**-0.5),
        scaling=torch.ones(experts),
        ranks=torch.full((experts,), rank, dtype=torch.int32),
    )


def random_adapter(spec: LayerSpec, rank: int, g: torch.Generator) -> Adapter:
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
    layer = LayerAdapter(
        gate=random_lora(g, experts, rank, hidden, width),
        up=random_lora(g, experts, rank, hidden, width),
        down=random_lora(g, experts, rank, width, hidden),
    )
    return Adapter(path=Path("random"), rank=rank, lora_alpha=float(rank), scaling=1.0, layers={spec.index: layer})


def random_batch(spec: LayerSpec, num_tokens: int, adapters: int, g: torch.Generator) -> LayerBatch:
    """Uniformly routed tokens; every token has one of ``adapters`` adapters in turn, or none has any."""
    slots = torch.arange(num_tokens, dtype=torch.int32) % adapters if adapters else None
    ids = torch.rand(num_tokens, spec.num_experts, generator=g).argsort(dim=1)[:, : spec.top_k]
    return LayerBatch(
        layer=spec.index,
        hidden_states=normal(g, num_tokens, spec.hidden_size, scale=1.0),
        topk_ids=ids.to(torch.int32).contiguous(),
        topk_weights=torch.rand(num_tokens, spec.top_k, generator=g),
        token_slots=slots,
    )


def checked_errors(
    out: Tensor, spec: LayerSpec, weights: LayerWeights, batch: LayerBatch, adapters: list[Adapter]
) -> dict[str, float]:
    """Relative Frobenius errors of ``out`` and of the same layer rounded to bf16 at every step.

    Raises ``SystemExit`` if the first exceeds the second by more than ``LARGEST_ERROR_RATIO``.
    """
    truth = layer_forward(spec, weights, batch, adapters)
    rounded = layer_forward(spec, weights, batch, adapters, dtype=torch.float32, rounding="bf16")
    error = float((out.double() - truth).norm() / truth.norm())
    measure = float((rounded.double() - truth).norm() / truth.norm())
    if not error <= LARGEST_ERROR_RATIO * measure:
        raise SystemExit(f"wrong result: relative error {error:.2e} where bf16 rounding gives {measure:.2e}")
    return {"relative_error": float(f"{error:.3g}"), "relative_error_of_bf16_rounding": float(f"{measure:.3g}")}


def timed(engine: ReferenceEngine, batch: LayerBatch, repeats: int) -> dict[str, Any]:
    """Milliseconds of a forward after two unmeasured ones: median, 10th and 90th percentile."""
    milliseconds: list[float] = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        engine.forward(batch)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    deciles = statistics.quantiles(milliseconds[2:], n=10, method="inclusive")
    return {
        "median_ms": round(statistics.median(milliseconds[2:]), 2),
        "p10_ms": round(deciles[0], 2),
        "p90_ms": round(deciles[-1], 2),
        "repeats": repeats,
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def circumstances(load: float) -> dict[str, Any]:
    """What a reader needs to repeat the run; ``load`` is the machine's over the minute before it."""
    return {
        "command": " ".join(["python -m benchmarks.reference_layer", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD")
        + ("+changes" if git("status", "--porcelain", "layer", "benchmarks/*.py") else ""),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(load, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="python -m benchmarks.reference_layer", description=__doc__)
    made.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    made.add_argument("--tokens", type=options.counts, default=[64], help="token counts, as 1,64")
    made.add_argument(
        "--adapters", type=options.numbers(0), default=[0, 1, 4], help="adapters over the tokens, 0 for none"
    )
    made.add_argument("--rank", type=options.number(1, options.MOST_RANK), default=16)
    made.add_argument("--repeats", type=options.replays, default=9)
    made.add_argument("--threads", type=options.number(1), help="torch threads; torch's own choice by default")
    made.add_argument("--results", type=options.folder, default=ROOT / "benchmarks" / "results")
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure; the exit code 0. Raises ``SystemExit`` for a wrong output."""
    chosen, load = parser().parse_args(arguments), os.getloadavg()[0]
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    spec = SHAPES[chosen.shape]
    g = torch.Generator().manual_seed(0)
    weights = random_weights(spec, g)
    model = ModelSpec(
        name=chosen.shape, model_type="random", path=Path("random"), num_hidden_layers=1, layers={spec.index: spec}
    )
    adapters = [random_adapter(spec, chosen.rank, g) for _ in range(max(chosen.adapters))]
    engine = ReferenceEngine(model, {spec.index: weights}, max_loras=max(1, len(adapters)), max_lora_rank=chosen.rank)
    for slot, adapter in enumerate(adapters):
        engine.install_adapter(slot, adapter)

    batches = [(t, a, random_batch(spec, t, a, g)) for t in chosen.tokens for a in chosen.adapters]
    rows: list[dict[str, Any]] = []
    for tokens, count, batch in batches:
        row = {"shape": chosen.shape, "tokens": tokens, "adapters": count, "rank": chosen.rank if count else 0}
        rows.append(row | timed(engine, batch, chosen.repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for row, (_, _, batch) in zip(rows, batches, strict=True):
        row.update(checked_errors(engine.forward(batch), spec, weights, batch, adapters))
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    held = weights.nbytes + sum(adapter.nbytes for adapter in adapters)
    report = circumstances(load) | {"weights_mib": round(held / 2**20), "process_peak_mib": round(peak), "rows": rows}
    chosen.results.mkdir(parents=True, exist_ok=True)
    path = unused(chosen.results / f"{report['date'][:10]}_reference_layer_{chosen.shape}.json")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
