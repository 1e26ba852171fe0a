"""How the GPU engine is set up: its slots, the shapes that are captured, and their plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..layer.errors import ConfigurationError
from .program import Plan

DECODE_SHAPES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Token counts captured by default, up to the decode limit."""
MAX_EAGER_TOKENS = 8192
"""Tokens of the largest eager forward; a larger batch runs in parts of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a ``GraphEngine`` is set up.

    ``decode_shapes`` are the captured token counts; what lies above ``max_decode_tokens`` runs eagerly.
    ``plan`` is that of every captured LoRA shape; None: what ``plan_choice.choose`` says of each.
    """

    max_loras: int = 8
    max_lora_rank: int = 64
    max_decode_tokens: int = 256
    decode_shapes: Sequence[int] = ()
    max_eager_tokens: int = MAX_EAGER_TOKENS
    plan: Plan | None = None

    @property
    def shapes(self) -> list[int]:
        """The token counts to capture, ascending, the decode limit always among them. Raises ``ConfigurationError``."""
        if self.max_decode_tokens < 1 or any(shape < 1 for shape in self.decode_shapes):
            raise ConfigurationError("the decode limit and every decode shape must be at least 1 token")
        chosen = {shape for shape in self.decode_shapes or DECODE_SHAPES if shape <= self.max_decode_tokens}
        return sorted(chosen | {self.max_decode_tokens})

    @property
    def eager_tokens(self) -> int:
        """Tokens of the largest shape that is not captured, where its sort fits."""
        return max(self.max_eager_tokens, self.max_decode_tokens + 1)
