"""Which bytes a forward brings and takes: worked out once for each token count that comes through an arena."""

from dataclasses import dataclass
from typing import NamedTuple

from .arena import Arena
from .buffers import InputLayout
from .fetching import Fetch
from .geometry import Geometry
from .pool import Variant


class Piece(NamedTuple):
    """A tensor of a batch, by its name there, and its place in the input block, in bytes."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What forwards of ``num_tokens`` tokens through one arena have in common; nothing of it depends on the layer.

    ``input`` and ``output`` are device addresses, ``in_bytes`` and ``out_bytes`` what crosses the bus. ``pieces`` are
    the tensors to write, but for ``hidden``, which may need padding. ``fetches`` bring the input by a kernel, one for
    each block of pinned memory that it may be in; none where a copy is to.
    """

    num_tokens: int
    pieces: tuple[Piece, ...]
    hidden: Piece
    input: int
    output: int
    in_bytes: int
    out_bytes: int
    fetches: tuple[Fetch, ...] = ()


def plan_transfer(geometry: Geometry, variant: Variant, arena: Arena, num_tokens: int) -> Transfer:
    """The transfer of ``num_tokens`` tokens, at most those of ``variant``, whose buffers are in ``arena``.

    Kernels for batches without adapters never look at slots, so that those are not written.
    """
    layout = InputLayout(geometry, variant.num_tokens, variant.routing)
    sizes = {name: layout.bytes_of(name, num_tokens) for name in layout.fields}
    pieces = {name: Piece(name, field.offset, sizes[name]) for name, field in layout.fields.items()}
    hidden = pieces.pop("hidden_states")
    if not variant.lora:
        del pieces["token_slots"]
    return Transfer(
        num_tokens=num_tokens,
        pieces=tuple(pieces.values()),
        hidden=hidden,
        input=arena.pointer("input"),
        output=arena.pointer("output"),
        in_bytes=hidden.offset + hidden.num_bytes,
        out_bytes=num_tokens * geometry.output_stride * 2,
    )
