"""CPU arithmetic in tiles of one fixed shape, so that a row's bits do not depend on the rows beside it.

A BLAS library chooses its kernel, and so the order of summing, by the shape of the product and the
number of threads; a vectorised function treats the last few elements of a range otherwise than the
rest. Both are avoided by never letting the shape depend on the batch: rows are padded to whole
tiles, products go in blocks too shallow for a library to split the sum over threads, and
elementwise functions run over whole blocks too small to be shared among threads.
"""

from collections.abc import Callable

from torch import Tensor

from .layout import round_up

ROW_TILE = 16
"""Rows of one product."""
DEPTH = 256
"""Terms of one product's sums; longer sums are added up block by block, in order."""
WIDTH = 2048
"""Most columns of one product: ``WIDTH * DEPTH`` fp32 of weights are converted at a time."""
LANES = 16
"""Columns and terms are padded to a multiple of this."""
ELEMENTS = 16384
"""Elements of one block of an elementwise function; torch splits work over threads from 32768 on."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in fp32, ``[n, N]``, from fp32 ``[n, K]`` and bf16 or fp32 ``[N, K]``.

    Each output row depends on its own input row and on ``weight`` alone, bit for bit, whatever ``n``
    and whichever row it is. Only a block of the weights is ever held in fp32.
    """
    rows, terms = x.shape
    columns = weight.shape[0]
    padded = x.new_zeros(round_up(rows, ROW_TILE), round_up(terms, LANES))
    padded[:rows, :terms] = x
    out = x.new_zeros(padded.shape[0], round_up(columns, LANES))
    # Narrow weights (LoRA) are converted many sums deep at once, wide ones a single sum deep.
    span = max(1, WIDTH // out.shape[1]) * DEPTH
    scratch = x.new_empty(min(WIDTH, out.shape[1]) * min(span, padded.shape[1]))
    for first in range(0, out.shape[1], WIDTH):
        for start in range(0, padded.shape[1], span):
            block = _fp32_block(weight[first : first + WIDTH, start : start + span], scratch)
            _accumulate(padded[:, start : start + span], block, out[:, first : first + WIDTH])
    return out[:rows, :columns]


def _fp32_block(weight: Tensor, scratch: Tensor) -> Tensor:
    """``weight`` in ``scratch``, padded with zeros."""
    rows, terms = round_up(weight.shape[0], LANES), round_up(weight.shape[1], LANES)
    block = scratch[: rows * terms].view(rows, terms)
    if block.shape != weight.shape:
        block.zero_()
    block[: weight.shape[0], : weight.shape[1]].copy_(weight)
    return block


def _accumulate(x: Tensor, block: Tensor, out: Tensor) -> None:
    """``out += x @ block.T``, a tile of rows and ``DEPTH`` terms at a time."""
    for start in range(0, x.shape[1], DEPTH):
        weight = block[:, start : start + DEPTH].T
        for top in range(0, x.shape[0], ROW_TILE):
            out[top : top + ROW_TILE].addmm_(x[top : top + ROW_TILE, start : start + DEPTH], weight)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of every element of fp32 ``x``, bit for bit the same wherever an element stands."""
    count = x.numel()
    blocks = x.new_zeros(round_up(count, ELEMENTS))
    blocks[:count] = x.reshape(-1)
    for start in range(0, len(blocks), ELEMENTS):
        block = blocks[start : start + ELEMENTS]
        block.copy_(function(block))
    return blocks[:count].view(x.shape)
