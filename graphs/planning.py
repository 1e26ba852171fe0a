"""What a GPU would hold for a model, worked out without one: weights, adapter slots, and the arena of every shape."""

import math
from dataclasses import dataclass

from ..layer.spec import ModelSpec, ranges
from .arena import ArenaRow
from .buffers import LORA_ENTRY, plan_buffers
from .geometry import Geometry
from .limits import check_limits
from .options import GraphOptions
from .pool import eager_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """The buffers of one token count, in bytes: of base batches, and of batches with adapters.

    Arenas of all shapes and layers lie in one allocation, for forwards follow each other.
    """

    layers: str
    tokens: int
    captured: bool
    base_arena_bytes: int
    lora_arena_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """GPU memory by use, in bytes, and how each shape's buffers add to it; ``buffers`` are those of the largest shape.

    What the driver takes for itself and for instantiated graphs comes on top: the engine reports that once it runs. So
    do a few MiB of each geometry's detour.
    """

    max_loras: int
    max_lora_rank: int
    weight_bytes: int
    slot_bytes: int
    all_slots_bytes: int
    arena_bytes: int
    shapes: tuple[ShapePlan, ...]
    buffers: tuple[ArenaRow, ...]


def plan_memory(model: ModelSpec, options: GraphOptions) -> MemoryPlan:
    """What ``GraphEngine`` allocates for ``model``, a router counted in bf16.

    Raises ``ConfigurationError`` where a Hopper GPU cannot serve it.
    """
    layers: dict[Geometry, list[int]] = {}
    decode_limit = options.shapes[-1]
    for index, spec in model.layers.items():
        geometry = Geometry.of(
            spec, router_fp32=False, max_loras=options.max_loras, max_lora_rank=options.max_lora_rank
        )
        check_limits(geometry, decode_limit + 1)
        layers.setdefault(geometry, []).append(index)
    eager = {geometry: eager_shapes(geometry, decode_limit, options.eager_tokens) for geometry in layers}
    shapes = [
        ShapePlan(
            layers=ranges(indices),
            tokens=tokens,
            captured=tokens <= decode_limit,
            base_arena_bytes=plan_buffers(geometry, tokens, lora=False).total_bytes,
            lora_arena_bytes=plan_buffers(
                geometry, tokens, lora=geometry.max_loras > 0, apart=tokens <= decode_limit
            ).total_bytes,
        )
        for geometry, indices in layers.items()
        for tokens in (*options.shapes, *eager[geometry])
    ]
    plans = [
        plan_buffers(geometry, shapes[-1], lora=geometry.max_loras > 0, apart=False)
        for geometry, shapes in eager.items()
    ]
    slot_bytes = sum(_slot_bytes(geometry) * len(indices) for geometry, indices in layers.items())
    return MemoryPlan(
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        weight_bytes=sum(_weight_bytes(geometry) * len(indices) for geometry, indices in layers.items()),
        slot_bytes=slot_bytes,
        all_slots_bytes=slot_bytes * options.max_loras,
        arena_bytes=max(shape.lora_arena_bytes for shape in shapes),
        shapes=tuple(shapes),
        buffers=tuple(max(plans, key=lambda plan: plan.total_bytes).describe()),
    )


def _weight_bytes(geometry: Geometry) -> int:
    expert = sum(math.prod(shape) for shape in geometry.packed_shapes.values())
    return 2 * (geometry.experts * expert + geometry.num_experts * geometry.hidden_stride)


def _slot_bytes(geometry: Geometry) -> int:
    return geometry.experts * (sum(geometry.slab_bytes.values()) + LORA_ENTRY.itemsize)
