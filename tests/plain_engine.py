"""An engine of plain arithmetic, and a service over it: each output row tells what it was computed from."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelet.layer.adapter import Adapter
from moelet.layer.engine import Forward, LayerBatch, check_slot
from moelet.layer.errors import EngineError
from moelet.layer.spec import LayerSpec, ModelSpec
from moelet.service.adapter_roots import AdapterRoots
from moelet.service.call import Answer, Call, name_tokens
from moelet.service.engine_thread import EngineThread
from moelet.service.limits import Limits
from moelet.service.service import MoeService

HIDDEN, EXPERTS, TOP_K = 8, 4, 2
LAYERS = (1, 3)
POISON = 255.0
"""A token that begins with this fails the batch that it is in."""
DIGIT = 128


def plain_model() -> ModelSpec:
    """Two layers of a handful of numbers."""
    specs = {
        index: LayerSpec(index=index, hidden_size=HIDDEN, intermediate_size=4, num_experts=EXPERTS, top_k=TOP_K)
        for index in LAYERS
    }
    return ModelSpec(name="plain", model_type="qwen3_moe", path=Path("plain"), num_hidden_layers=4, layers=specs)


class PlainEngine:
    """Adds to each token its layer and the code of its adapter, as whole numbers that bf16 holds exactly.

    ``begun`` are the batches in the order begun. Forwards wait inside of ``closed``. A slot that is written while a
    forward reads it is noted in ``wrongs``; so are forwards beyond ``depth``, and results out of order.
    """

    device = "cpu"
    max_lora_rank = 8

    def __init__(
        self,
        *,
        max_loras: int = 3,
        depth: int = 2,
        batch_tokens: int = 8,
        most_tokens: int = 0,
        begins_at_once: bool = False,
    ) -> None:
        self.model = plain_model()
        self.max_loras = max_loras
        self.depth = depth
        self.begins_at_once = begins_at_once
        self.batch_tokens = batch_tokens
        self.most_tokens = most_tokens or batch_tokens
        self.begun: list[LayerBatch] = []
        self.installed: list[tuple[int, float]] = []
        self.wrongs: list[str] = []
        self.refuses: set[float] = set()
        self.refuses_once = False
        self.lost_rows = 0
        self.error: Exception | None = None
        self._slots: list[float | None] = [None] * max_loras
        self._reading: Counter[int] = Counter()
        self._flying: list[PlainForward] = []
        self._gate, self._install_gate = threading.Event(), threading.Event()
        self._gate.set()
        self._install_gate.set()

    def input_memory(self, num_bytes: int) -> memoryview | None:  # noqa: ARG002
        return None

    def begin(self, batch: LayerBatch) -> Forward:
        batch.check(self.model.layer(batch.layer), self.max_loras)
        self.begun.append(batch)
        slots = [] if batch.token_slots is None else batch.token_slots.tolist()
        codes = [self._code(slot) for slot in slots] or [0.0] * batch.num_tokens
        forward = PlainForward(self, output_of(batch.layer, batch.hidden_states, codes), {s for s in slots if s >= 0})
        if bool((batch.hidden_states[:, 0] == POISON).any()):
            forward.error = EngineError("a poisoned token")
        self._flying.append(forward)
        self._reading.update(forward.slots)
        if len(self._flying) > self.depth:
            self.wrongs.append(f"{len(self._flying)} forwards at once")
        if self.depth == 1:
            self._gate.wait(30)
        return forward

    def _code(self, slot: int) -> float:
        code = 0.0 if slot < 0 else self._slots[slot]
        if code is None:
            raise EngineError(f"slot {slot} is empty")
        return code

    def land(self, forward: "PlainForward") -> None:
        """``forward`` is waited for."""
        assert self._gate.wait(30)
        if self._flying.pop(0) is not forward:
            self.wrongs.append("a result out of order")
        self._reading.subtract(forward.slots)
        if self.error is not None:
            raise self.error

    def install_adapter(self, slot: int, adapter: Adapter) -> None:
        self._write(slot, None)
        assert self._install_gate.wait(30)
        if adapter.lora_alpha in self.refuses:
            if self.refuses_once:
                self.refuses.discard(adapter.lora_alpha)
            raise EngineError("out of memory while copying an adapter")
        self._write(slot, adapter.lora_alpha)
        self.installed.append((slot, adapter.lora_alpha))

    def remove_adapter(self, slot: int) -> None:
        self._write(slot, None)

    def _write(self, slot: int, code: float | None) -> None:
        check_slot(slot, self.max_loras)
        if self._reading[slot] > 0:
            self.wrongs.append(f"slot {slot} was written while it was read")
        self._slots[slot] = code

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": 1024}

    def plans(self, layer: int) -> Sequence[Mapping[str, Any]]:
        return [{"plan": "plain", "layer": layer}]

    def close(self) -> None:
        self._gate.set()

    def closed(self) -> AbstractContextManager[None]:
        """No forward ends inside of this."""
        return _cleared(self._gate)

    def installing_closed(self) -> AbstractContextManager[None]:
        """No adapter is installed inside of this."""
        return _cleared(self._install_gate)

    @property
    def tags(self) -> list[list[float]]:
        """The first number of each token of each batch begun."""
        return [batch.hidden_states[:, 0].tolist() for batch in self.begun]


@contextmanager
def _cleared(gate: threading.Event) -> Iterator[None]:
    gate.clear()
    try:
        yield
    finally:
        gate.set()


class PlainForward:
    """A forward that was begun."""

    def __init__(self, engine: PlainEngine, output: Tensor, slots: set[int]) -> None:
        self.slots = slots
        self.error: Exception | None = None
        self._engine = engine
        self._output = output

    def result(self) -> Tensor:
        self._engine.land(self)
        if self.error is not None:
            raise self.error
        return self._output[self._engine.lost_rows :]


def output_of(layer: int, hidden: Tensor, codes: Sequence[float]) -> Tensor:
    """What the engine makes of tokens whose adapters have ``codes``, 0 for none."""
    numbers = torch.tensor(codes, dtype=torch.float64)
    added = torch.zeros(hidden.shape, dtype=torch.float64)
    added[:, 1] = layer
    added[:, 2] = numbers % DIGIT
    added[:, 3] = (numbers / DIGIT).floor()
    return (hidden.double() + added).bfloat16()


def tokens(*tags: float) -> Tensor:
    """bf16 ``[T, H]``, each token its tag and zeros."""
    hidden = torch.zeros(len(tags), HIDDEN, dtype=torch.bfloat16)
    hidden[:, 0] = torch.tensor(tags)
    return hidden


class PlainService:
    """A ``MoeService`` over a ``PlainEngine``; each adapter that is read gets the next code, from 1."""

    def __init__(
        self, engine: PlainEngine, root: Path, *, max_cpu_loras: int = 6, limits: Limits | None = None
    ) -> None:
        self.engine = engine
        self.failing_read: Exception | None = None
        self.codes = count(1)
        self.folder = root / "adapter"
        self.folder.mkdir(exist_ok=True)
        self._template = Adapter(path=self.folder, rank=2, lora_alpha=0.0, scaling=1.0, layers={})
        self.service = MoeService(
            EngineThread(lambda: engine), AdapterRoots([root]), self._read, max_cpu_loras=max_cpu_loras, limits=limits
        )

    def _read(self, _folder: Path, _root: Path) -> Adapter:
        if self.failing_read is not None:
            raise self.failing_read
        return replace(self._template, lora_alpha=float(next(self.codes)))

    async def load(self, name: str, *, replace: bool = False, pinned: bool | None = None) -> float:
        """Load an adapter; its code."""
        version, _ = await self.service.adapters.load(
            name, str(self.folder), param="path", replace=replace, pinned=pinned
        )
        return version.adapter.lora_alpha

    async def forward(
        self,
        hidden: Tensor,
        adapter: str | None = None,
        adapters: Sequence[str | None] | None = None,
        *,
        layer: int = 1,
        timeout_s: float | None = None,
        **routing: Tensor,
    ) -> Answer:
        """One forward."""
        names, token_names = name_tokens(len(hidden), adapter, adapters)
        timeouts = self.service.timeouts
        deadline = None if timeout_s is None else timeouts.from_header(str(round(timeout_s * 1e3, 3)))
        call = Call(LayerBatch(layer=layer, hidden_states=hidden, **routing), names, token_names)
        return await self.service.forward(call, deadline)

    async def settled(self) -> None:
        """Wait until no batch and no install is under way."""
        table = self.service.adapters.table
        while any(version.holds or version.installing for version in table.slot_table() if version) or table.retired:
            await asyncio.sleep(0.001)

    def check_idle(self) -> None:
        """Nothing is held, waited for or wrong."""
        service = self.service
        assert self.engine.wrongs == []
        assert service.lifecycle.in_flight == 0
        sample = service.metrics.registry.get_sample_value
        assert (sample("moelet_queue_requests"), sample("moelet_queue_tokens")) == (0, 0)
        assert set(service.adapters.in_flight_by_name().values()) <= {0}
        assert [v for v in service.adapters.table.slot_table() if v and v.holds] == []
        assert service.adapters.table.retired == ()


@asynccontextmanager
async def plain_service(
    root: Path, engine: PlainEngine | None = None, *, max_cpu_loras: int = 6, **limits: Any
) -> AsyncIterator[PlainService]:
    """A started service, idle again at the end."""
    plain = PlainService(engine or PlainEngine(), root, max_cpu_loras=max_cpu_loras, limits=Limits(**limits))
    await plain.service.start()
    try:
        yield plain
        await asyncio.wait_for(plain.settled(), 10)
        plain.check_idle()
    finally:
        await plain.service.stop()
