"""A few small forwards of every plan, captured and eager, with adapters: a program to run under a memory checker.

Run it from the repository's root: ``compute-sanitizer --tool memcheck python tests/sanitized_forward.py``. With
``each`` adapters come by a call of the driver for each copy: initcheck does not see what one call for all writes.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from gpu_engines import opened_engine  # noqa: E402
from moelet.graphs import row_copies  # noqa: E402
from moelet.graphs.program import Plan  # noqa: E402
from moelet.layer.spec import LayerSpec, RoutingSpec  # noqa: E402
from random_layers import random_adapter, random_batch, random_weights  # noqa: E402

SPEC = LayerSpec(
    index=0,
    hidden_size=136,
    intermediate_size=72,
    num_experts=6,
    top_k=2,
    routing=RoutingSpec(renormalize=True),
    shared_intermediate_size=100,
    shared_gated=True,
)


WHOLE = replace(SPEC, hidden_size=256)
"""Rows as long as kernels write them: outputs of captured shapes are written to host memory by the last kernel."""


def main() -> None:
    outputs = []
    for plan in Plan:
        spec = WHOLE if plan is Plan.TWO_STREAM else SPEC
        weights = random_weights(spec)
        adapters = [random_adapter(spec, 1, rank=3), random_adapter(spec, 2, rank=12, shared_outer=True)]
        options = {"max_loras": 2, "max_lora_rank": 16, "decode_shapes": (2, 8), "max_decode_tokens": 8}
        most = 300 if plan is Plan.FUSED else 80  # by the kernels of many tokens once, and of few
        with opened_engine(spec, weights, plan=plan, max_eager_tokens=most, **options) as engine:
            for slot, adapter in enumerate(adapters):
                engine.install_adapter(slot, adapter)
            for tokens in (1, 7, 70):  # captured with padding, of few and of more experts, and eager
                for slots in (None, [0, -1, 1]):
                    batch = random_batch(spec, tokens, slots=slots, drop=0.2)
                    outputs.append(engine.forward(batch))
                    outputs.append(engine.forward(replace(batch, topk_ids=None, topk_weights=None)))
            engine.remove_adapter(0)
    assert all(output.isfinite().all() for output in outputs)
    print(f"{len(outputs)} forwards")


if __name__ == "__main__":
    if "each" in sys.argv[1:]:
        row_copies.batch_call = lambda: None
    main()
