"""Binary inference requests of many kinds over an asyncio connection, and their answers taken apart."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .connection import HEAD_END, post

DATATYPES = {torch.bfloat16: "BF16", torch.int32: "INT32", torch.float32: "FP32"}


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: its status, and of a 200 the output, bf16 ``[T, H]``, and the versions it was computed by."""

    status: int
    headers: Mapping[str, str]
    text: str
    output: Tensor | None = None
    versions: Mapping[str, int] | None = None


def inference(
    layer: int, tensors: Mapping[str, Tensor], adapters: Sequence[str | None], timeout_ms: float | None = None
) -> bytes:
    """A whole request for ``layer``; ``adapters`` has one name or None for each token."""
    inputs: list[dict[str, Any]] = []
    binary = []
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        size = {"binary_data_size": len(raw)}
        datatype = DATATYPES[tensor.dtype]
        inputs.append({"name": name, "shape": list(tensor.shape), "datatype": datatype, "parameters": size})
        binary.append(raw)
    if any(adapters):
        names = [name or "" for name in adapters]
        inputs.append({"name": "adapter", "shape": [len(names)], "datatype": "BYTES", "data": names})
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    if timeout_ms is not None:
        headers["X-Request-Timeout-Ms"] = f"{timeout_ms:g}"
    return post(f"/v2/models/layers.{layer}/infer", head + b"".join(binary), **headers)


def control(method: str, target: str, **fields: Any) -> bytes:
    """A request with a JSON body."""
    return post(target, json.dumps(fields).encode() if fields else b"").replace(b"POST", method.encode(), 1)


class Caller:
    """One kept-alive connection, opened again once it has ended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, request: bytes, sip_s: float = 0.0) -> Answered:
        """Send ``request`` and read its answer; with ``sip_s`` in small pieces with pauses between."""
        reader, writer = await self._connected()
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(HEAD_END)).decode("latin-1")
        status, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self._body(reader, int(headers["content-length"]), sip_s)
        if headers.get("connection") == "close":
            self.drop()
        return _taken_apart(int(status.split()[1]), headers, body)

    async def leave(self, request: bytes, after_s: float) -> None:
        """Send ``request`` and go away before it is answered, most likely."""
        _, writer = await self._connected()
        writer.write(request)
        await asyncio.sleep(after_s)
        self.drop()

    def drop(self) -> None:
        """End the connection at once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            self.drop()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def _body(self, reader: asyncio.StreamReader, length: int, sip_s: float) -> bytes:
        if not sip_s:
            return await reader.readexactly(length)
        body = b""
        while len(body) < length:
            await asyncio.sleep(sip_s)
            body += await reader.readexactly(min(length - len(body), 256))
        return body


def _taken_apart(status: int, headers: Mapping[str, str], body: bytes) -> Answered:
    length = headers.get("inference-header-content-length")
    if status != 200 or length is None:
        return Answered(status, headers, body.decode(errors="replace"))
    head = json.loads(body[: int(length)])
    [told] = head["outputs"]
    output = torch.frombuffer(bytearray(body[int(length) :]), dtype=torch.bfloat16).reshape(told["shape"])
    return Answered(status, headers, "", output, json.loads(head["parameters"]["adapter_versions"]))
