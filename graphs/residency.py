"""A layer's weights on the GPU, packed once at start-up, and the head that tells kernels where they are."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layer import layout
from ..layer.spec import LayerSpec
from ..layer.weights import LayerWeights
from .buffers import FORWARD_ARGS, LAYER_ARGS
from .geometry import ROW_TILE, Geometry
from .memory import DeviceBuffer


class _CudaView:
    """Lets torch see device memory that is not its own, as int16: torch knows no other way to a raw bf16 address."""

    def __init__(self, address: int, num_elements: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_elements,),
            "typestr": "<i2",
            "version": 3,
        }


def device_view(address: int, shape: tuple[int, ...], ordinal: int) -> Tensor:
    """A torch bf16 view of device memory at ``address``; it must not outlive the memory."""
    flat: Any = _CudaView(address, int(np.prod(shape, dtype=np.int64)))
    return torch.as_tensor(flat, device=f"cuda:{ordinal}").view(torch.bfloat16).view(shape)


class ResidentLayer:
    """One layer's weights in swizzled BlockMajorK on GPU ``ordinal``, shared experts as further experts.

    ``args`` is the part of ``LAYER_ARGS`` that names them. Packing runs on the GPU where torch can use it,
    expert by expert, so that start-up takes about the time of the copies. Raises ``DriverError`` where memory is short.
    """

    def __init__(self, spec: LayerSpec, geometry: Geometry, weights: LayerWeights, ordinal: int) -> None:
        weights.check(spec)
        self.geometry = geometry
        self._ordinal = ordinal
        self._buffers: list[DeviceBuffer] = []
        self.args = np.zeros((), dtype=LAYER_ARGS)
        self._gate_up = self._allocate("gate_up", geometry.experts * self._expert_bytes("gate_up"))
        self._down = self._allocate("down", geometry.experts * self._expert_bytes("down"))
        self._pack(0, weights.gate_up, weights.down)
        for index, (rows, columns) in enumerate(shared_chunks(spec, weights), geometry.num_local_experts):
            self._pack(index, rows[None], columns[None])
        self._small("router", _padded(router_matrix(weights), geometry.hidden_stride))
        if weights.correction_bias is not None:
            self._small("correction_bias", weights.correction_bias.float())
        if geometry.shared_gated and weights.shared_gate is not None:
            self._small("shared_gate", _padded(weights.shared_gate, geometry.hidden_stride))
        if self._packs_on_gpu:
            torch.cuda.synchronize(ordinal)

    @property
    def head(self) -> bytes:
        """What of ``args`` every forward of the layer begins with."""
        return self.args.tobytes()[: -FORWARD_ARGS.size]

    @property
    def num_bytes(self) -> int:
        """GPU bytes of the layer."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the weights."""
        for buffer in self._buffers:
            buffer.close()

    @property
    def _packs_on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def _expert_bytes(self, name: str) -> int:
        return math.prod(self.geometry.packed_shapes[name]) * 2

    def _pack(self, first: int, gate_up: Tensor, down: Tensor) -> None:
        self._pack_into(self._gate_up, "gate_up", first, gate_up, layout.pack_gate_up)
        self._pack_into(self._down, "down", first, down, layout.pack_down)

    def _pack_into(self, target: DeviceBuffer, name: str, first: int, matrices: Tensor, pack: Any) -> None:
        offset = first * self._expert_bytes(name)
        if self._packs_on_gpu:
            shape = (matrices.shape[0], *self.geometry.packed_shapes[name])
            out = device_view(target.pointer + offset, shape, self._ordinal)
            pack(matrices, row_tile=ROW_TILE, swizzled=True, out=out)
        else:
            target.write(pack(matrices, row_tile=ROW_TILE, swizzled=True), offset)

    def _small(self, name: str, tensor: Tensor) -> None:
        self._allocate(name, max(tensor.nbytes, 16)).write(tensor)

    def _allocate(self, name: str, num_bytes: int) -> DeviceBuffer:
        buffer = DeviceBuffer(num_bytes)
        self._buffers.append(buffer)
        self.args[name] = buffer.pointer
        return buffer


def shared_chunks(spec: LayerSpec, weights: LayerWeights) -> list[tuple[Tensor, Tensor]]:
    """The shared experts as experts of the routed width: (gate and up rows ``[2I, H]``, down columns ``[H, I]``).

    A gated MLP of width ``n*I`` is the sum of ``n`` of width I; a last one that is not whole is filled with zeros.
    """
    if weights.shared_gate_up is None or weights.shared_down is None:
        return []
    inter, total = spec.intermediate_size, spec.shared_intermediate_size
    chunks = []
    for start in range(0, total, inter):
        width = min(inter, total - start)
        rows = weights.shared_gate_up.new_zeros(2 * inter, spec.hidden_size)
        rows[:width] = weights.shared_gate_up[start : start + width]
        rows[inter : inter + width] = weights.shared_gate_up[total + start : total + start + width]
        columns = weights.shared_down.new_zeros(spec.hidden_size, inter)
        columns[:, :width] = weights.shared_down[:, start : start + width]
        chunks.append((rows, columns))
    return chunks


def router_matrix(weights: LayerWeights) -> Tensor:
    """The router as the gate kernel reads it: bf16 as stored, anything else in fp32."""
    return weights.router if weights.router.dtype == torch.bfloat16 else weights.router.float()


def _padded(matrix: Tensor, columns: int) -> Tensor:
    padded = matrix.new_zeros(matrix.shape[0], columns)
    padded[:, : matrix.shape[1]] = matrix
    return padded
