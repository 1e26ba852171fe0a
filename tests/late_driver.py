"""The GPU engine over a fake driver that does everything as late as it may, and computes what can be checked."""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_driver import ok
from fake_engine import ELSEWHERE, BusDriver, started
from moelet.graphs.buffers import INPUT_HEAD, InputLayout
from moelet.graphs.driver import driver
from moelet.graphs.engine import GraphEngine
from moelet.graphs.geometry import Geometry
from moelet.graphs.pool import Runnable
from moelet.graphs.streams import Stream
from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec

PIECES = ("token_slots", "topk_ids", "topk_weights", "router_logits")
"""What comes with hidden states, whatever of it."""


class LateDriver(BusDriver):
    """Once ``late``, work on a stream is done when somebody waits for it, or when ``step`` is called, and no sooner.

    ``fails_in``: so many calls from now one fails, behind its work if ``works_first``; None: none does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.lock = threading.RLock()
        self.work: dict[int, deque[Callable[[], None]]] = {}
        self.given: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.records: dict[int, tuple[int, int]] = {}
        self.fails_in: int | None = None
        self.works_first = False

    def logged(self, name: str) -> Any:
        method = super().logged(name)

        def called(*arguments: Any) -> Any:
            with self.lock:
                if self.fails_in is None or name in ("cuGetErrorString", "cuMemHostGetDevicePointer"):
                    return method(*arguments)
                self.fails_in -= 1
                if self.fails_in >= 0:
                    return method(*arguments)
                self.fails_in = None
                if self.works_first:
                    method(*arguments)
                code = driver.CUresult.CUDA_ERROR_UNKNOWN
                return int(code) if name == "cuPointerGetAttributes" else (code,)

        called.__name__ = name
        return called

    def put(self, stream: Any, work: Callable[[], None]) -> None:
        if not self.late:
            work()
            return
        self.work.setdefault(int(stream), deque()).append(work)
        self.given[int(stream)] = self.given.get(int(stream), 0) + 1

    def run(self, stream: int, upto: int) -> None:
        while self.done.get(stream, 0) < upto:
            self.done[stream] = self.done.get(stream, 0) + 1
            self.work[stream].popleft()()

    def step(self, chance: random.Random) -> None:
        """Do some of what is due, of any stream."""
        with self.lock:
            for stream, given in list(self.given.items()):
                done = self.done.get(stream, 0)
                self.run(stream, chance.randint(done, given))

    def read(self, source: int, num_bytes: int) -> bytes:
        """Host memory as the device reads it: page-locked, all of it."""
        assert any(at <= source and source + num_bytes <= at + size for at, size in self.locked.items()), "not locked"
        return ctypes.string_at(source, num_bytes)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> Any:
        result = super().cuLaunchKernelEx(config, function, parameters, extra)
        if int(function) == self.fetch:
            first, rest, target, split, lanes = self.fetched()

            def bring() -> None:
                sent = self.read(first - ELSEWHERE, 16 * split) + self.read(rest - ELSEWHERE, 16 * (lanes - split))
                ctypes.memmove(target, sent, len(sent))

            self.put(config.hStream, bring)
        self.launches.clear()
        return result

    def cuMemcpyHtoDAsync(self, target: Any, source: Any, num_bytes: int, stream: Any) -> Any:
        def copy() -> None:
            ctypes.memmove(int(target), self.read(int(source), num_bytes), num_bytes)

        self.put(stream, copy)
        return ok()

    def cuMemcpyDtoHAsync(self, target: Any, source: Any, num_bytes: int, stream: Any) -> Any:
        def copy() -> None:
            self.read(int(target), num_bytes)
            ctypes.memmove(int(target), int(source), num_bytes)

        self.put(stream, copy)
        return ok()

    def cuMemcpyDtoDAsync(self, target: Any, source: Any, num_bytes: int, stream: Any) -> Any:
        self.put(stream, lambda: ctypes.memmove(int(target), int(source), num_bytes) and None)
        return ok()

    def cuEventRecord(self, event: Any, stream: Any) -> Any:
        self.records[int(event)] = (int(stream), self.given.get(int(stream), 0))
        return super().cuEventRecord(event, stream)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> Any:
        if self.late:
            recorded = self.records[int(event)]
            self.put(stream, lambda: self.run(*recorded))
        return super().cuStreamWaitEvent(stream, event, flags)

    def cuEventSynchronize(self, event: Any) -> Any:
        self.run(*self.records.get(int(event), (0, 0)))
        return ok()

    def cuStreamSynchronize(self, stream: Any) -> Any:
        self.run(int(stream), self.given.get(int(stream), 0))
        return ok()


def mixed(hidden: "np.ndarray", **pieces: "np.ndarray | None") -> "np.ndarray":
    """What the fake layer makes of rows of hidden states, int16 ``[T, H]``: of every row, and all that came with it."""
    total = np.zeros(len(hidden), np.int64)
    for place, name in enumerate(PIECES, 1):
        if (given := pieces.get(name)) is not None and len(hidden):
            words = given.reshape(len(hidden), -1).astype(np.int64) + (name == "token_slots")
            total += place * (words * (1 + np.arange(words.shape[1]))).sum(axis=1)
    result: np.ndarray = hidden ^ (total % 30011).astype(np.int16)[:, None]
    return result


def expected(batch: LayerBatch) -> "np.ndarray":
    """What a forward of ``batch`` gives, int16 ``[T, H]``."""
    pieces = {}
    for name in PIECES:
        tensor: Tensor | None = getattr(batch, name)
        pieces[name] = None if tensor is None else tensor.contiguous().view(torch.int32).numpy()
    return mixed(batch.hidden_states.contiguous().view(torch.int16).numpy(), **pieces)


def computes(fake: LateDriver, geometry: Geometry) -> Callable[[Runnable, Stream], None]:
    """What runs forwards: what they would, and behind it the fake layer."""
    launch = Runnable.run

    def run(self: Runnable, stream: Stream) -> None:
        launch(self, stream)
        fake.put(stream, lambda: compute(self, geometry))

    return run


def compute(runnable: Runnable, geometry: Geometry) -> None:
    """The fake layer over one arena."""
    variant, arena = runnable.variant, runnable.arena
    layout = InputLayout(geometry, variant.num_tokens, variant.routing)
    start = arena.pointer("input")
    _, output, tokens = INPUT_HEAD.unpack(ctypes.string_at(start, INPUT_HEAD.size))

    def words(name: str, dtype: Any) -> "np.ndarray":
        there = ctypes.string_at(start + layout.fields[name].offset, layout.bytes_of(name, tokens))
        return np.frombuffer(there, dtype).reshape(tokens, -1)

    names = [name for name in PIECES if name in layout.fields and (name != "token_slots" or variant.lora)]
    rows = mixed(words("hidden_states", np.int16)[:, : geometry.hidden_size], **{n: words(n, np.int32) for n in names})
    made = np.zeros((tokens, geometry.output_stride), np.int16)
    made[:, : geometry.hidden_size] = rows
    ctypes.memmove(output - ELSEWHERE if output else arena.pointer("output"), made.tobytes(), made.nbytes)


@contextmanager
def opened_late(monkeypatch: pytest.MonkeyPatch, spec: LayerSpec) -> Iterator[tuple[GraphEngine, LateDriver]]:
    """An engine of one layer, and its driver, which is late from here on; all is freed in the end."""
    fake = LateDriver()
    with started(monkeypatch, spec, fake) as engine:
        monkeypatch.setattr(Runnable, "run", computes(fake, engine._layers[0].geometry))
        fake.late = True
        yield engine, fake
