"""One forward in the Open Inference Protocol, version 2, with binary tensors: arrays to a body, a body to an array."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

Array = np.ndarray[Any, np.dtype[Any]]

HEADER = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes of a body are JSON; tensors follow."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor to send: its name, protocol datatype and shape, and its bytes (little-endian, row-major)."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Array | bytes

    @property
    def nbytes(self) -> int:
        """How many bytes it adds to a body."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


def encode(inputs: Sequence[WireTensor], parameters: Mapping[str, str]) -> tuple[bytes, int]:
    """(body, bytes of it that are JSON); every tensor is copied once.

    The JSON is padded with spaces so that the first tensor is aligned for whoever reads it in place.
    """
    described = [
        {
            "name": tensor.name,
            "shape": tensor.shape,
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for tensor in inputs
    ]
    wanted = [{"name": "hidden_states", "parameters": {"binary_data": True}}]
    head = orjson.dumps({"inputs": described, "outputs": wanted, "parameters": parameters})
    head = head.ljust(-(-len(head) // _ALIGNMENT) * _ALIGNMENT)
    parts: list[Any] = [head, *(tensor.data for tensor in inputs)]
    return b"".join(parts), len(head)


def encode_names(names: Sequence[str | None]) -> bytes:
    """A BYTES tensor of ``names``; None is the empty string."""
    elements = {name: (name or "").encode() for name in set(names)}
    prefixed = {name: len(element).to_bytes(4, "little") + element for name, element in elements.items()}
    return b"".join(map(prefixed.__getitem__, names))


def decode(body: bytes, header: str | None, shape: Sequence[int]) -> tuple[Array, dict[str, int]]:
    """The output ``hidden_states`` of ``shape`` as the bits of bf16, uint16 in place, and the adapter versions.

    ``header`` is the value of ``HEADER``. Raises ``ValueError`` saying how the answer breaks the protocol.
    """
    if header is None or not (header.isascii() and header.isdecimal()) or int(header) > len(body):
        raise ValueError(f"{HEADER} should be a number of bytes up to {len(body)}, got {header!r}")
    start, size = int(header), 2 * math.prod(shape)
    head = orjson.loads(body[:start])
    try:
        (output,) = head["outputs"]
        described = output["name"], output["datatype"], output["shape"]
        versions = orjson.loads(head.get("parameters", {}).get("adapter_versions", "{}"))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its JSON should describe one output: {error!r}") from error
    if described != ("hidden_states", "BF16", list(shape)):
        raise ValueError(f"its output should be hidden_states, BF16 of {list(shape)}, got {described}")
    if len(body) - start != size:
        raise ValueError(f"its output should take {size} bytes, got {len(body) - start}")
    bits = np.frombuffer(body, "<u2", offset=start) if size else np.empty(0, np.uint16)
    return bits.reshape(shape), versions
