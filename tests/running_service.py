"""A real service in this process for tests: uvicorn on a loopback port in a thread, over any engine."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from safetensors.torch import save_file

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.engine import Engine, Forward, LayerBatch
from moelet.layer.spec import LayerSpec, ModelSpec, RoutingSpec
from moelet.layer.weights import LayerWeights
from moelet.service.adapter_roots import AdapterRoots
from moelet.service.app import create_app
from moelet.service.engine_thread import EngineThread
from moelet.service.http_config import http_config
from moelet.service.keys import Keys
from moelet.service.limits import Limits
from moelet.service.service import MoeService

HIDDEN, WIDTH, EXPERTS, TOP_K = 48, 40, 6, 2
LAYERS = (1, 3)
PROJECTIONS = ("gate", "up", "down")
MAX_BODY_BYTES = 1 << 20

OpenEngine = Callable[[ModelSpec, Mapping[int, LayerWeights], int, int], Engine]
"""Opens an engine on (model, weights, max_loras, max_lora_rank)."""


def small_model() -> tuple[ModelSpec, dict[int, LayerWeights]]:
    """Layers 1 and 3 of four, random weights; 0 is dense and 2 was left out."""
    seeded = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=seeded) * shape[-1] ** -0.5).bfloat16()

    specs = {
        index: LayerSpec(
            index=index,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_experts=EXPERTS,
            top_k=TOP_K,
            routing=RoutingSpec(renormalize=True),
        )
        for index in LAYERS
    }
    weights = {
        index: LayerWeights(
            gate_up=random(EXPERTS, 2 * WIDTH, HIDDEN),
            down=random(EXPERTS, HIDDEN, WIDTH),
            router=4 * random(EXPERTS, HIDDEN),
        )
        for index in LAYERS
    }
    model = ModelSpec(
        name="small",
        model_type="qwen3_moe",
        path=Path("small"),
        num_hidden_layers=4,
        layers=specs,
        skipped={0: "it is dense", 2: "it was left out"},
    )
    return model, weights


def random_adapter(seed: int, rank: int = 3) -> Adapter:
    """A per-expert adapter of every projection and layer, alpha twice the rank, strong enough to be seen."""
    seeded = torch.Generator().manual_seed(seed)

    def lora(out: int, into: int) -> LoraWeights:
        return LoraWeights(
            a=(torch.randn(EXPERTS, rank, into, generator=seeded) * into**-0.5).bfloat16(),
            b=(torch.randn(EXPERTS, out, rank, generator=seeded) * 0.3).bfloat16(),
            scaling=torch.full((EXPERTS,), 2.0),
            ranks=torch.full((EXPERTS,), rank, dtype=torch.int32),
        )

    layers = {
        index: LayerAdapter(gate=lora(WIDTH, HIDDEN), up=lora(WIDTH, HIDDEN), down=lora(HIDDEN, WIDTH))
        for index in LAYERS
    }
    return Adapter(path=Path(), rank=rank, lora_alpha=2.0 * rank, scaling=2.0, layers=layers)


def write_adapter(folder: Path, adapter: Adapter, **config: Any) -> Path:
    """``adapter`` as PEFT writes per-expert linear modules, with ``config`` over its adapter_config.json."""
    folder.mkdir(parents=True)
    written = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.lora_alpha, "bias": "none"}
    written["target_modules"] = [f"{name}_proj" for name in PROJECTIONS]
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    tensors = {}
    for index, layer in adapter.layers.items():
        for name, lora in layer.items():
            for expert in range(EXPERTS):
                module = f"base_model.model.model.layers.{index}.mlp.experts.{expert}.{name}_proj"
                tensors[f"{module}.lora_A.weight"] = lora.a[expert].contiguous()
                tensors[f"{module}.lora_B.weight"] = lora.b[expert].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_bad_adapters(root: Path) -> None:
    """Folders below and beside ``root`` that must not load, and ``good``, which must."""
    good = random_adapter(1)
    write_adapter(root / "good", good)
    write_adapter(root / "dora", good, use_dora=True)
    write_adapter(root / "rank9", random_adapter(1, rank=9))
    narrow = {i: replace(layer, up=replace(layer.up, b=layer.up.b[:, 1:])) for i, layer in good.layers.items()}
    write_adapter(root / "narrow", replace(good, layers=narrow))
    weights = write_adapter(root / "truncated", good) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "empty").mkdir()
    outside = write_adapter(root.parent / "outside", good)
    (root / "link").symlink_to(outside)
    linked = write_adapter(root / "linked_weights", good) / "adapter_model.safetensors"
    linked.unlink()
    linked.symlink_to(outside / "adapter_model.safetensors")


class GatedEngine:
    """An engine whose forwards wait while ``gate`` is cleared, and which fails on demand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.error: Exception | None = None
        self.forwards = 0

    @property
    def begins_at_once(self) -> bool:
        return self.gate.is_set() and self.engine.begins_at_once

    def begin(self, batch: LayerBatch) -> Forward:
        self.forwards += 1
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return self.engine.begin(batch)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Forwards wait inside of this."""
        self.waiting.clear()
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    @contextmanager
    def failing(self, error: Exception) -> Iterator[None]:
        """Forwards raise ``error`` inside of this."""
        self.error = error
        try:
            yield
        finally:
            self.error = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class RunningService:
    """What a test speaks to, and what it compares with."""

    client: httpx.Client
    service: MoeService
    engine: GatedEngine
    weights: Mapping[int, LayerWeights]
    root: Path
    adapters: dict[str, Adapter] = field(default_factory=dict)

    def write(self, name: str, seed: int, rank: int = 3) -> str:
        """A random adapter in the folder ``name`` of the root; kept in ``adapters`` to compare with."""
        self.adapters[name] = random_adapter(seed, rank)
        if not (self.root / name).exists():
            write_adapter(self.root / name, self.adapters[name])
        return str(self.root / name)

    def load(self, name: str, path: str, **fields: Any) -> httpx.Response:
        """Load as vLLM spells it."""
        return self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})

    def forward(self, layer: int | str = 1, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        """A forward with ``body``, tensors as lists."""
        sent = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in body.items()}
        return self.client.post(f"/v1/layers/{layer}/forward", json=sent, headers=headers)

    def output(self, layer: int = 1, **body: Any) -> torch.Tensor:
        """The output of a forward that must succeed."""
        answer = self.forward(layer, **body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["hidden_states"])

    def records(self) -> list[dict[str, Any]]:
        """``GET /v1/adapters`` as it is."""
        records: list[dict[str, Any]] = self.client.get("/v1/adapters").json()["adapters"]
        return records

    def unload_all(self) -> None:
        """Back to no adapter."""
        for record in self.records():
            self.client.delete(f"/v1/adapters/{record['name']}")

    def metric(self, name: str, **labels: str) -> float:
        """One sample of ``GET /metrics``; 0 where it has not been seen yet."""
        assert self.client.get("/metrics").status_code == 200
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


def hidden_states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 ``[T, H]`` as float32, so that JSON carries it exactly."""
    values = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().float()


@contextmanager
def running(
    open_engine: OpenEngine,
    root: Path | None,
    *,
    max_loras: int = 3,
    max_cpu_loras: int = 6,
    max_lora_rank: int = 8,
    more_roots: Sequence[Path] = (),
    keys: Keys | None = None,
    bounds: Limits | None = None,
    **limits: Any,
) -> Iterator[RunningService]:
    """A service over ``open_engine`` with adapters below ``root`` (None: no root), until the block ends.

    ``bounds`` are those of its forwards, ``limits`` those of ``listening``.
    """
    model, weights = small_model()
    gated: list[GatedEngine] = []

    def opened() -> Engine:
        gated.append(GatedEngine(open_engine(model, weights, max_loras, max_lora_rank)))
        return gated[0]  # type: ignore[return-value]

    roots = AdapterRoots([*([root] if root else []), *more_roots])

    def read(folder: Path, root: Path) -> Adapter:
        return load_adapter(folder, model, max_rank=max_lora_rank, root=root)

    service = MoeService(EngineThread(opened), roots, read, max_cpu_loras=max_cpu_loras, limits=bounds)
    with listening(service, keys, **limits) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield RunningService(client, service, gated[0], weights, root or Path())


@contextmanager
def listening(
    service: MoeService, keys: Keys | None = None, *, fast: bool = True, loop: str = "auto", **limits: Any
) -> Iterator[str]:
    """``service`` behind uvicorn on a free loopback port, every request through the application unless ``fast``, on
    uvicorn's ``loop``; the URL."""
    app = create_app(service, max_body_bytes=MAX_BODY_BYTES, keys=keys)
    told = {"refused": service.metrics.answered, "ended": service.metrics.connection_ended}
    config = http_config(app, known=app.known if fast else None, **{**told, **limits})
    config.port, config.loop = 0, loop
    server = uvicorn.Server(config)
    started = threading.Event()
    server.on_tick = partial(_tick, server.on_tick, started)  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    assert started.wait(30), "uvicorn did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "uvicorn did not stop"


async def _tick(on_tick: Callable[[int], Any], started: threading.Event, counter: int) -> bool:
    started.set()
    stop: bool = await on_tick(counter)
    return stop
