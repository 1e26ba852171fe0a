"""One running service: the engine thread, the adapters, the queue and what is known of them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from starlette.types import Receive

from ..layer.errors import EngineFailedError, LayerNotServedError
from ..layer.slots import AdapterTable
from ..layer.spec import LayerSpec, ModelSpec, ranges
from .adapter_reading import AdapterReader, AdapterReading, ReadsBeside
from .adapter_roots import AdapterRoots
from .adapters import AdapterRegistry
from .afterwards import Afterwards
from .batcher import Batcher
from .call import Answer, Call
from .deadline import Deadline, Timeouts
from .departure import Departures
from .engine_thread import EngineThread
from .lifecycle import Lifecycle
from .limits import Limits
from .metrics import Metrics
from .rows import Rows
from .sent_text import utf8
from .work import Work, answer_of


class MoeService:
    """What the routes speak to; made before the event loop runs, then used on it alone.

    Adapters are read by ``read_adapter``, or ``beside`` this process where there is one that does. ``plans`` holds what
    the engine said of each layer's execution plans at start.
    """

    def __init__(
        self,
        engine: EngineThread,
        roots: AdapterRoots,
        read_adapter: AdapterReader,
        *,
        beside: ReadsBeside | None = None,
        max_cpu_loras: int,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.engine = engine
        self.model: ModelSpec = engine.model
        self.created = int(time.time())
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        self.later = Afterwards()
        table = AdapterTable(engine.max_loras, max_cpu_loras)
        reading = AdapterReading(roots, read_adapter, beside)
        self.adapters = AdapterRegistry(table, engine, roots, reading, self.later)
        self.metrics.watch_adapters(self.adapters)
        self.plans: Mapping[int, Sequence[Mapping[str, Any]]] = engine.submit(
            lambda opened: {index: list(opened.plans(index)) for index in opened.model.layers}
        ).result()
        memory: Mapping[str, int] = engine.submit(lambda opened: dict(opened.memory_bytes)).result()
        name = utf8(self.model.name)
        self.metrics.watch_service(self.lifecycle, name, engine.device, self.plans, engine.depth, memory)
        self.timeouts = Timeouts(limits.request_timeout_s)
        self._batcher = Batcher(engine, self.adapters, self.metrics, limits, self.later)
        self._departures = Departures()

    async def start(self) -> None:
        """Begin to answer forwards, on the running event loop."""
        loop = asyncio.get_running_loop()

        def on_failure(error: EngineFailedError) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        self.engine.on_failure = on_failure
        self._batcher.start()
        self.lifecycle.started = True

    async def stop(self) -> None:
        """Count what was answered last, and end every thread; call once nothing is in flight."""
        self.lifecycle.begin_drain()
        self.later.catch_up()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the threads and free the engine."""
        self.adapters.close()
        self.engine.close()

    def layer(self, number: str) -> LayerSpec:
        """The spec of the layer that a path names. Raises ``LayerNotServedError``."""
        if not (number.isascii() and number.isdecimal() and len(number) <= 9):
            served = ranges(self.model.layers)
            raise LayerNotServedError(f"{number!r} is no layer number; the layers served are {served}", "layer")
        return self.model.layer(int(number))

    def check_admission(self) -> None:
        """Raise ``UnavailableError`` or ``EngineFailedError`` unless a forward would be taken now.

        For routes, before they read a body.
        """
        self.lifecycle.check_admission()
        self._batcher.check_room()

    def begin(self, call: Call, deadline: Deadline, ended: Callable[[Work], None]) -> Work:
        """Begin ``call``, which has tokens, with the adapter versions that are current now.

        ``ended`` is called on a later turn of the event loop with the work's output or error, unless ``drop`` was
        called before; with that of a ``deadline`` that has passed as well. Raises ``UnavailableError`` or
        ``EngineFailedError`` when no work is taken, and ``AdapterNotLoadedError``.
        """
        self.lifecycle.enter()
        is_late = deadline.has_passed()
        try:
            versions = () if is_late else self.adapters.acquire(call.names)
        except BaseException:
            self.lifecycle.leave()
            raise
        work = Work(call.batch, versions, call.token_names, deadline, partial(self._end, ended))
        if is_late:
            work.fail(deadline.error())
            return work
        try:
            self._batcher.begin(work)
        except BaseException:
            self.drop(work)
            raise
        return work

    def drop(self, work: Work) -> None:
        """Nobody waits any more for ``work``, which ``begin`` returned: what is not being computed of it already is
        not computed. Nothing where it has ended."""
        if work.forget():
            self._let_go(work)

    def _end(self, ended: Callable[[Work], None], work: Work) -> None:
        self._let_go(work)
        ended(work)

    def _let_go(self, work: Work) -> None:
        self._batcher.let_go(work)
        if work.versions:
            self.adapters.release(work.versions)
        self.lifecycle.leave()

    async def forward(self, call: Call, deadline: Deadline | None = None) -> Answer:
        """Run ``call`` with the adapter versions that are current now, by ``deadline`` (None: as late as any may).

        A cancelled call is not computed unless it is being computed already. Raises as ``begin`` does, and what the
        engine raises.
        """
        if deadline is None:
            deadline = self.timeouts.longest()
        if call.batch.num_tokens == 0:
            return self._of_no_tokens(call, deadline)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        work = self.begin(call, deadline, partial(_settle, future))
        try:
            return await future
        finally:
            self.drop(work)
            del future  # it holds an error, and the error's traceback this frame

    def _of_no_tokens(self, call: Call, deadline: Deadline) -> Answer:
        with self.lifecycle.admit():
            deadline.check()
            versions = self.adapters.acquire(call.names)
            none = Rows.of(torch.empty_like(call.batch.hidden_states))
            answer = Answer.of(call.batch.layer, none, versions)
            self.adapters.release(versions)
            return answer

    async def forward_for_client(self, call: Call, deadline: Deadline, receive: Receive) -> Answer:
        """``forward`` for the client of an HTTP request whose body has been read to its end.

        What every route that computes awaits: ``receive`` is that of the request, and when the client goes away the
        work is dropped. Raises ``ClientDisconnect`` then, else as ``forward`` does.
        """
        return await self._departures.unless_gone(self.forward(call, deadline), receive)

    def describe(self) -> dict[str, Any]:
        """What is served, layer by layer."""
        return {
            "model": utf8(self.model.name),
            "model_type": self.model.model_type,
            "device": self.engine.device,
            "max_loras": self.engine.max_loras,
            "max_lora_rank": self.engine.max_lora_rank,
            "layers": [self._describe_layer(spec) for _, spec in sorted(self.model.layers.items())],
            "skipped": dict(self.model.skipped),
        }

    def _describe_layer(self, spec: LayerSpec) -> dict[str, Any]:
        facts = asdict(spec)
        return {"layer": facts.pop("index"), **facts, "plans": list(self.plans[spec.index])}

    def _fail(self, error: EngineFailedError) -> None:
        self.lifecycle.failure = error
        self._batcher.fail(error)


def _settle(future: "asyncio.Future[Answer]", work: Work) -> None:
    if future.done():  # whoever waited was cancelled
        return
    if work.error is not None:
        future.set_exception(work.error)
    else:
        future.set_result(answer_of(work))
