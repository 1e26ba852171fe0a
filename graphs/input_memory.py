"""Page-locked memory for those who bring inputs: a forward reads hidden states in it where they are."""

from collections.abc import Iterable

from .geometry import Geometry
from .locked_blocks import LockedBlocks

BLOCKS = 16
"""How many inputs have such memory at a time; others are as right, and are copied."""
BESIDE = 4096
"""Bytes of a block beside its tensors, for what requests have in front of them."""


class InputMemory:
    """Blocks that each hold the inputs of ``tokens`` tokens of any of ``geometries``."""

    def __init__(self, geometries: Iterable[Geometry], tokens: int) -> None:
        self._blocks = LockedBlocks(BLOCKS, BESIDE + tokens * max(map(_token_bytes, geometries)))

    def take(self, num_bytes: int) -> memoryview | None:
        """Memory of so many bytes, from a page's start on, until the last view of it is gone; None where there is none.
        On any thread."""
        block = self._blocks.take(num_bytes)
        return None if block is None else self._blocks.octets(block, num_bytes)

    def close(self) -> None:
        """Unlock the memory; views stay good. A second call does nothing."""
        self._blocks.close()


def _token_bytes(geometry: Geometry) -> int:
    """Of a token's hidden state, not padded, and of what routes it."""
    return 2 * geometry.hidden_size + max(8 * geometry.top_k, 4 * geometry.num_experts)
