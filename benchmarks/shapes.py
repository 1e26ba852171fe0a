"""The layers that benchmarks run: those of known checkpoints by name, any other by its numbers."""

import re
from dataclasses import replace

from moelet.layer.spec import LayerSpec


def _whole(num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, shared: int = 0) -> LayerSpec:
    return LayerSpec(
        index=0,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        shared_intermediate_size=shared,
    )


SHAPES = {
    "qwen3-30b-a3b": _whole(128, 8, 2048, 768),
    "qwen3.5-35b-a3b": replace(_whole(256, 8, 2048, 512, shared=512), shared_gated=True),
    "mixtral-8x7b": _whole(8, 2, 4096, 14336),
    "qwen3-30b-a3b-ep4": _whole(128, 8, 2048, 768).expert_slice(32, 32),
    "qwen3-235b-a22b": _whole(128, 8, 4096, 1536),
    "deepseek-v3-ep8": _whole(256, 8, 7168, 2048, shared=2048).expert_slice(32, 32),
}
"""Sizes as the checkpoints' ``config.json`` say. ``ep4`` and ``ep8`` are the second of four and of eight
expert-parallel slices; shared experts belong to the first slice, so ``deepseek-v3-ep8`` computes none."""
DEFAULT_SHAPE = "qwen3-30b-a3b"
SHARED = "-shared"
"""Behind the name of a layer that was run with its shared experts."""
_NUMBERED = re.compile(r"e(\d+)-k(\d+)-h(\d+)-i(\d+)")


def names() -> list[str]:
    """What results call the layers that have a name, those with shared experts once more with them."""
    return list(dict.fromkeys([*SHAPES, *map(with_shared, SHAPES)]))


def with_shared(name: str) -> str:
    """What results call the layer ``name`` when it computes its shared experts: ``name`` where there are none."""
    return f"{name}{SHARED}" if name in SHAPES and SHAPES[name].holds_shared_experts else name


def named(name: str, *, shared: bool) -> LayerSpec:
    """The layer called ``name``, without its shared experts unless ``shared``."""
    spec = SHAPES[name]
    return spec if shared else replace(spec, shared_intermediate_size=0, shared_gated=False)


def numbered(num_experts: int, top_k: int, hidden_size: int, intermediate_size: int) -> tuple[str, LayerSpec]:
    """A layer of these sizes, and what results call it. Raises ``UnsupportedCheckpointError`` for impossible ones."""
    spec = _whole(num_experts, top_k, hidden_size, intermediate_size)
    return f"e{num_experts}-k{top_k}-h{hidden_size}-i{intermediate_size}", spec


def called(name: str) -> LayerSpec | None:
    """The layer that results call ``name``, without its shared experts unless the name says so; None where none is
    called so."""
    if name in SHAPES:
        return named(name, shared=False)
    plain = name.removesuffix(SHARED)
    if plain in SHAPES and with_shared(plain) == name:
        return named(plain, shared=True)
    numbers = _NUMBERED.fullmatch(name)
    return numbered(*map(int, numbers.groups()))[1] if numbers else None
