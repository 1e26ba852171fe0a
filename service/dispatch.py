"""Brings admitted forwards to the engine thread: queues them, gives their adapters slots, splits and rejoins."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..layer.engine import Engine, LayerBatch
from ..layer.errors import AdapterCapacityError
from ..layer.slots import AdapterVersion
from .adapters import AdapterRegistry
from .engine_thread import EngineThread
from .metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """One admitted forward.

    ``batch``           what to compute, its ``token_slots`` still open
    ``versions``        the adapter versions it holds; released when its work is over, however it ends
    ``token_versions``  int64 ``[T]``, which of ``versions`` each token uses, -1 for none; None: no adapter
    ``result``          bf16 ``[T, H]``, or the error
    """

    batch: LayerBatch
    versions: tuple[AdapterVersion, ...]
    token_versions: Tensor | None
    result: "asyncio.Future[Tensor]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of some work that runs in one engine call: ``rows`` of it (None: all), and its versions."""

    batch: LayerBatch
    rows: Tensor | None
    versions: tuple[AdapterVersion, ...]
    installs: tuple[AdapterVersion, ...]


class Dispatcher:
    """One consumer of one queue: works run in the order they came, one engine call at a time."""

    def __init__(self, engine: EngineThread, adapters: AdapterRegistry, metrics: Metrics) -> None:
        self._engine = engine
        self._adapters = adapters
        self._metrics = metrics
        self._waiting: deque[Work] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        metrics.watch_queue(lambda: len(self._waiting), lambda: sum(w.batch.num_tokens for w in self._waiting))

    def start(self) -> None:
        """Begin to serve the queue; call on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="moelet-dispatcher")

    async def stop(self) -> None:
        """Stop serving; call when nothing is in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def forward(self, work: Work) -> Tensor:
        """Queue ``work`` and wait for its output, bf16 ``[T, H]``. Raises what the engine raises."""
        self._waiting.append(work)
        self._arrived.set()
        return await work.result

    async def _serve(self) -> None:
        while True:
            while self._waiting:
                await self._finish(self._waiting.popleft())
            self._arrived.clear()
            await self._arrived.wait()

    async def _finish(self, work: Work) -> None:
        """Run ``work`` unless its caller is gone, and let go of its adapters; an error ends this work alone."""
        try:
            if not work.result.done():
                output = await self._compute(work)
                if not work.result.done():
                    work.result.set_result(output)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            if not work.result.done():
                work.result.set_exception(error)
        finally:
            self._adapters.release(work.versions)

    async def _compute(self, work: Work) -> Tensor:
        """The whole output; split by adapters where they are more than the slots that can be had."""
        output: Tensor | None = None
        rest = list(range(len(work.versions)))
        base_rows_open = True
        while rest or base_rows_open:
            group, installs = self._place(work.versions, rest)
            rest = rest[len(group) :]
            versions = tuple(work.versions[i] for i in group)
            try:
                piece = _piece(work, group, installs, with_base_rows=base_rows_open)
                base_rows_open = False
                part = await self._run(piece)
            except BaseException:
                self._adapters.table.unplace(versions)
                for version in installs:
                    self._adapters.table.vacate(version)
                self._adapters.settle()
                raise
            self._adapters.table.unplace(versions)
            self._adapters.settle()
            if piece.rows is None:
                return part
            if output is None:
                output = torch.empty_like(work.batch.hidden_states)
            output[piece.rows] = part
        assert output is not None
        return output

    def _place(
        self, versions: Sequence[AdapterVersion], rest: Sequence[int]
    ) -> tuple[list[int], tuple[AdapterVersion, ...]]:
        """Place as many of ``rest`` as get slots now; their indices, and those that must be installed."""
        group = list(rest[: self._engine.max_loras])
        while True:
            try:
                return group, tuple(self._adapters.table.place([versions[i] for i in group]))
            except AdapterCapacityError:
                if len(group) <= 1:
                    raise
                group.pop()

    async def _run(self, piece: Piece) -> Tensor:
        def call(engine: Engine) -> tuple[Tensor, float]:
            for version in piece.installs:
                assert version.slot is not None
                engine.install_adapter(version.slot, version.adapter)
            started = time.perf_counter()
            output = engine.forward(piece.batch)
            return output, time.perf_counter() - started

        output, seconds = await self._engine.run(call)
        self._metrics.forward_seconds.observe(seconds)
        return output


def _piece(work: Work, group: Sequence[int], installs: tuple[AdapterVersion, ...], *, with_base_rows: bool) -> Piece:
    """The tokens of ``work`` that use the versions of ``group``, and those without adapter on demand."""
    versions = tuple(work.versions[i] for i in group)
    if work.token_versions is None:
        return Piece(work.batch, None, versions, installs)
    slots = torch.full((len(work.versions) + 1,), -1, dtype=torch.int32)
    for i in group:
        slot = work.versions[i].slot
        assert slot is not None
        slots[i] = slot
    if len(group) == len(work.versions):
        batch = replace(work.batch, token_slots=slots[work.token_versions])
        return Piece(batch, None, versions, installs)
    wanted = torch.zeros(len(work.versions) + 1, dtype=torch.bool)
    wanted[list(group)] = True
    wanted[-1] = with_base_rows
    rows = wanted[work.token_versions].nonzero().flatten()
    token_slots = slots[work.token_versions[rows]]
    return Piece(_select(work.batch, rows, token_slots), rows, versions, installs)


def _select(batch: LayerBatch, rows: Tensor, token_slots: Tensor) -> LayerBatch:
    """Some tokens of ``batch``."""

    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return LayerBatch(
        layer=batch.layer,
        hidden_states=batch.hidden_states[rows],
        topk_ids=of(batch.topk_ids),
        topk_weights=of(batch.topk_weights),
        router_logits=of(batch.router_logits),
        token_slots=token_slots,
    )
