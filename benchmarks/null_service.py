"""A server process for measurements: the service over an engine that computes nothing, or a bare echo.

``python -m benchmarks.null_service service|echo SHAPE`` prints the loopback port that it serves on, and ends when its
standard input does.
"""

import asyncio
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from moelet.layer.adapter import Adapter
from moelet.layer.engine import Finished, Forward, LayerBatch, check_slot
from moelet.layer.spec import LayerSpec, ModelSpec
from moelet.service.adapter_roots import AdapterRoots
from moelet.service.app import create_app
from moelet.service.engine_thread import EngineThread
from moelet.service.garbage import search_seldom
from moelet.service.http_config import http_config
from moelet.service.service import MoeService

from . import shapes

MAX_BODY_BYTES = 64 << 20


class NullEngine:
    """An ``Engine`` whose output is its input."""

    device = "cpu"
    max_loras = 1
    max_lora_rank = 1
    depth = 2
    begins_at_once = True
    batch_tokens = most_tokens = 256

    def __init__(self, spec: LayerSpec) -> None:
        self.model = ModelSpec(
            name="null", model_type="null", path=Path("null"), num_hidden_layers=1, layers={spec.index: spec}
        )

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """None of a GPU's."""
        return {}

    def input_memory(self, num_bytes: int) -> memoryview | None:  # noqa: ARG002
        """None: any memory does."""
        return None

    def begin(self, batch: LayerBatch) -> Forward:
        """Done at once."""
        return Finished(batch.hidden_states)

    def forward(self, batch: LayerBatch) -> torch.Tensor:
        """The hidden states."""
        return batch.hidden_states

    def install_adapter(self, slot: int, adapter: Adapter) -> None:  # noqa: ARG002
        """Nothing, in a slot that is there. Raises ``EngineError`` for another."""
        check_slot(slot, self.max_loras)

    def remove_adapter(self, slot: int) -> None:
        """Nothing, in a slot that is there. Raises ``EngineError`` for another."""
        check_slot(slot, self.max_loras)

    def plans(self, layer: int) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        """None."""
        return ()

    def close(self) -> None:
        """Nothing."""


def service_app(spec: LayerSpec) -> ASGIApp:
    """The whole application, with every middleware, over ``NullEngine``."""

    def read(_folder: Path, _root: Path) -> Adapter:
        raise AssertionError("no adapter is loaded here")

    service = MoeService(EngineThread(lambda: NullEngine(spec)), AdapterRoots([]), read, max_cpu_loras=1)
    return create_app(service, max_body_bytes=MAX_BODY_BYTES)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body: what no server on this stack can be faster than."""
    if scope["type"] == "lifespan":
        for state in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{state}.complete"})
        return
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = b"".join(parts)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve(app: ASGIApp) -> None:
    """Serve ``app`` under the service's own configuration until standard input ends."""
    config = http_config(app, known=getattr(app, "known", None))
    search_seldom()
    server = uvicorn.Server(config)

    def end_with_input() -> None:
        sys.stdin.read()
        server.should_exit = True

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=end_with_input, daemon=True).start()
        await server.serve(sockets=[listener])


def main(arguments: Sequence[str]) -> None:
    """Serve what the first argument names, for the layer that the second names."""
    kind, shape = arguments
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    app = echo if kind == "echo" else service_app(shapes.SHAPES[shape])
    with asyncio.Runner(loop_factory=http_config(app).get_loop_factory()) as runner:
        runner.run(serve(app))


if __name__ == "__main__":
    main(sys.argv[1:])
