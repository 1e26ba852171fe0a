"""Torch tensors and numpy arrays as the protocol's bytes and back, without importing torch for those who have none."""

import sys
from typing import Any, TypeVar

import numpy as np

from ...layer.errors import RequestError
from .wire import Array, WireTensor

Tensor = TypeVar("Tensor")
"""A torch tensor or a numpy array; what comes back is of the kind that was sent."""

_FLOATS = {"float32": ("FP32", "<f4"), "float16": ("FP16", "<f2"), "bfloat16": ("BF16", "<u2")}
_INTEGERS = {"int32": ("INT32", "<i4"), "int64": ("INT64", "<i8")}


def send_hidden_states(value: Any) -> WireTensor:
    """``value`` ``[T, H]`` as bf16, the layer's own format; float arrays of numpy go as they are, and the
    service rounds them alike."""
    torch = _torch_of(value)
    name = _dtype_name("hidden_states", value, _FLOATS)
    if torch is None:
        return _wire("hidden_states", name, value)
    rounded = value.detach().to(torch.bfloat16).cpu().contiguous()
    return WireTensor("hidden_states", "BF16", list(value.shape), rounded.view(torch.int16).numpy())


def send_ids(name: str, value: Any) -> WireTensor:
    """Expert ids, int32 or int64 ``[T, top_k]``."""
    dtype = _dtype_name(name, value, _INTEGERS)
    return _wire(name, dtype, value if _torch_of(value) is None else value.detach().cpu().numpy())


def send_floats(name: str, value: Any) -> WireTensor:
    """Weights or logits, any of the float formats, as float32."""
    dtype, torch = _dtype_name(name, value, _FLOATS), _torch_of(value)
    if torch is not None:
        return _wire(name, "float32", value.detach().float().cpu().numpy())
    return _wire(name, "float32", widen(value.view(np.uint16)) if dtype == "bfloat16" else value.astype(np.float32))


def receive_like(bits: Array, sent: Tensor) -> Tensor:
    """bf16 ``bits`` in the kind, dtype and on the device of ``sent``, in memory of its own."""
    like: Any = sent
    if (torch := _torch_of(like)) is None:
        name = like.dtype.name
        with np.errstate(over="ignore"):
            result: Any = bits.copy().view(like.dtype) if name == "bfloat16" else widen(bits).astype(name, copy=False)
        return result  # type: ignore[no-any-return]
    result = torch.empty(bits.shape, dtype=torch.bfloat16)
    result.view(torch.int16).numpy()[...] = bits.view(np.int16)
    return result.to(like.device, like.dtype)  # type: ignore[no-any-return]


def widen(bits: Array) -> Array:
    """The bits of bf16 as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _wire(name: str, dtype: str, value: Array) -> WireTensor:
    datatype, stored = (_FLOATS | _INTEGERS)[dtype]
    bits = value.view(np.uint16) if dtype == "bfloat16" else value
    return WireTensor(name, datatype, value.shape, np.ascontiguousarray(bits, stored))


def _dtype_name(name: str, value: Any, accepted: dict[str, tuple[str, str]]) -> str:
    """The name of ``value``'s dtype, or ``RequestError`` if it is no ``[T, n]`` of an accepted one."""
    if not isinstance(value, np.ndarray) and _torch_of(value) is None:
        raise RequestError(f"{name} should be a torch tensor or a numpy array, got a {type(value).__name__}", name)
    dtype = str(value.dtype).removeprefix("torch.") if _torch_of(value) else value.dtype.name
    if dtype not in accepted or value.ndim != 2:
        raise RequestError(
            f"{name} should be two-dimensional, of {' or '.join(accepted)}, got {dtype} of shape {list(value.shape)}",
            name,
        )
    return dtype


def _torch_of(value: Any) -> Any:
    """The torch module if ``value`` is one of its tensors, else None; who never imported it has none."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None
