"""A few small forwards of every plan, captured and eager, with adapters: a program to run under a memory checker.

Run it from the repository's root: ``compute-sanitizer --tool memcheck python tests/sanitized_forward.py``. With
``each`` adapters come by a call of the driver for each copy: initcheck does not see what one call for all writes. With
``once`` no ring comes round in any block: to racecheck an arrival at a barrier is that of one lane and not of the warp
that it has synchronised with before, and so every second round is a race.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu_engines import opened_engine  # noqa: E402
from moelet.graphs import geometry, mlp_launches, row_copies  # noqa: E402
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


PLAIN = replace(SPEC, hidden_size=104, shared_intermediate_size=0, shared_gated=False)
"""Of this a block has one item, of two row tiles in two K-blocks: less than a ring, in which the end is marked too."""
MANY = replace(PLAIN, num_experts=64, num_local_experts=-1, top_k=8)
"""Of this a block has many items, and its rings come round."""


def crowded_outputs(spec: LayerSpec, tokens: int) -> Iterator[Tensor]:
    """By an expert MLP for many tokens of each expert: tiles of two halves, with adapters wider ones; of pairs of row
    tiles and of single ones."""
    options = {"max_loras": 2, "max_lora_rank": 16, "decode_shapes": (2,), "max_decode_tokens": 2}
    for rounds in (0, mlp_launches.PAIR_ROUNDS):
        mlp_launches.PAIR_ROUNDS = rounds
        with opened_engine(spec, random_weights(spec), max_eager_tokens=tokens, **options) as engine:
            engine.install_adapter(0, random_adapter(spec, 1, rank=12))
            for slots in (None, [0, -1]):
                batch = random_batch(spec, tokens, slots=slots, drop=0.2)
                assert batch.topk_ids is not None
                batch.topk_ids[: tokens // 2] = torch.arange(spec.top_k)
                yield engine.forward(batch)


def main() -> None:
    geometry.HALVES_ABOVE, geometry.MANY_EXPERTS = 100, 1
    outputs = list(crowded_outputs(PLAIN, 160))
    if "once" not in sys.argv[1:]:
        outputs += crowded_outputs(MANY, 400)
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
