"""The engine's threads: which of them begins a forward, and which puts adapters into slots."""

import asyncio
import threading
from pathlib import Path

import torch

from moelet.layer.adapter import Adapter
from moelet.layer.engine import Forward, LayerBatch
from moelet.layer.errors import EngineError
from moelet.service.call import Answer
from plain_engine import PlainEngine, PlainService, output_of, plain_service, tokens


def test_an_install_that_failed_is_tried_again_for_the_next_request(tmp_path: Path) -> None:
    """Those that waited for it have its error, whichever came first; others do not notice."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "ab"}
        plain.engine.refuses.add(codes["b"])
        plain.engine.refuses_once = True
        forwards = []
        with plain.engine.installing_closed():
            for names in ("ab", "ba"):
                forwards.append(asyncio.ensure_future(plain.forward(tokens(1, 2), adapters=list(names))))
                forwards.append(asyncio.ensure_future(plain.forward(tokens(3))))
                await asyncio.sleep(0.01)
        first, base, second, other = await asyncio.gather(*forwards, return_exceptions=True)
        assert isinstance(first, EngineError)
        assert isinstance(second, EngineError)
        for answer in (base, other):
            assert isinstance(answer, Answer)
            assert torch.equal(answer.hidden_states, output_of(1, tokens(3), [0.0]))
        again = await plain.forward(tokens(1, 2), adapters=["a", "b"])
        assert torch.equal(again.hidden_states, output_of(1, tokens(1, 2), [codes["a"], codes["b"]]))

    async def checked() -> None:
        async with plain_service(tmp_path, PlainEngine(depth=2)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())


def test_a_forward_that_is_begun_at_once_is_not_handed_over(tmp_path: Path) -> None:
    """It is begun where it is formed, unless the engine's thread has something to do; adapters have a thread apart."""
    threads: list[str] = []
    installs: list[str] = []
    working, go_on = threading.Event(), threading.Event()

    class Noting(PlainEngine):
        def begin(self, batch: LayerBatch) -> Forward:
            threads.append(threading.current_thread().name)
            return super().begin(batch)

        def install_adapter(self, slot: int, adapter: Adapter) -> None:
            installs.append(threading.current_thread().name)
            super().install_adapter(slot, adapter)

        def remove_adapter(self, slot: int) -> None:
            installs.append(threading.current_thread().name)
            super().remove_adapter(slot)

    async def check(plain: PlainService) -> None:
        await plain.load("a")
        await plain.forward(tokens(1))
        await plain.forward(tokens(1), adapter="a")
        busy = plain.service.engine.submit(lambda _engine: working.set() or go_on.wait(30))
        assert working.wait(10)
        handed_over = asyncio.ensure_future(plain.forward(tokens(1), adapter="a"))
        await asyncio.sleep(0.01)
        go_on.set()
        busy.result(10)
        await handed_over
        assert threads == ["MainThread", "MainThread", "moelet-engine"]
        await plain.service.adapters.unload("a", 5)
        while len(installs) < 2:
            await asyncio.sleep(0.01)
        assert set(installs) == {"moelet-slots"}

    async def checked() -> None:
        async with plain_service(tmp_path, Noting(depth=2, begins_at_once=True)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())
