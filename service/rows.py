"""Rows of a batch's output for whom they belong to, as a tensor or as bytes: whichever is asked for, and made then."""

from ctypes import string_at

import torch
from torch import Tensor

COPIED = 16384
"""So many bytes are copied sooner than torch and numpy say where they lie."""


class Output:
    """The output of a batch, bf16 ``[T, H]``, and the bytes that it lies in."""

    __slots__ = ("_octets", "_row_bytes", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._octets = octets_of(tensor)
        self._row_bytes = tensor.shape[1] * tensor.itemsize

    def octets(self, start: int, stop: int) -> memoryview:
        """The bytes of rows ``start .. stop``, row-major."""
        return self._octets[start * self._row_bytes : stop * self._row_bytes]


class Rows:
    """Rows ``start .. stop`` of ``output``."""

    __slots__ = ("_output", "_start", "_stop")

    def __init__(self, output: Output, start: int, stop: int) -> None:
        self._output = output
        self._start = start
        self._stop = stop

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """All rows of ``tensor``, bf16 ``[T, H]``."""
        return cls(Output(tensor), 0, len(tensor))

    @property
    def shape(self) -> tuple[int, int]:
        """How many there are, and H."""
        return self._stop - self._start, self._output.tensor.shape[1]

    @property
    def tensor(self) -> Tensor:
        """bf16 ``[t, H]``, a view."""
        return self._output.tensor[self._start : self._stop]

    @property
    def octets(self) -> memoryview:
        """Their bytes where they lie, row-major."""
        return self._output.octets(self._start, self._stop)


def octets_of(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor, row-major: where they lie, or a copy of few."""
    tensor = tensor.contiguous()
    if (size := tensor.nbytes) <= COPIED:
        return memoryview(string_at(tensor.data_ptr(), size) if size else b"")
    values: memoryview = tensor.view(torch.uint8).numpy().data
    return values.cast("B")
