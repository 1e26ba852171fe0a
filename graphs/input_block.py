"""A block of pinned memory that a forward's input is written to: the head, and each tensor at its place."""

import ctypes

from torch import Tensor

from ..layer.engine import LayerBatch
from .buffers import INPUT_HEAD
from .memory import PinnedBuffer
from .transfer import Piece, Transfer


class InputBlock:
    """``num_bytes`` at ``address`` on the host and ``device_address`` on the device.

    ``no_slots``: the slots of batches that have none, where the kernels look at them.
    """

    __slots__ = ("_buffer", "_head", "_no_slots", "address", "device_address")

    def __init__(self, num_bytes: int, no_slots: Tensor) -> None:
        self._buffer = PinnedBuffer(num_bytes)
        self._no_slots = no_slots
        self.address = self._buffer.pointer
        self.device_address = self._buffer.device_pointer
        self._head = (ctypes.c_uint8 * INPUT_HEAD.size).from_address(self.address)

    def write(self, layer: bytes, output: int, batch: LayerBatch, transfer: Transfer) -> None:
        """All but hidden states: what names the layer, the device's address of the output, and tensors of ``batch``."""
        INPUT_HEAD.pack_into(self._head, 0, layer, output, transfer.num_tokens)
        for name, offset, num_bytes in transfer.pieces:
            tensor: Tensor | None = getattr(batch, name)
            sent = self._no_slots if tensor is None else tensor.contiguous()
            ctypes.memmove(self.address + offset, sent.data_ptr(), num_bytes)

    def write_hidden(self, hidden: Tensor, place: Piece) -> None:
        """Hidden states, contiguous and as wide as the kernels' rows."""
        ctypes.memmove(self.address + place.offset, hidden.data_ptr(), place.num_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
