"""The engine's threads: a slot holds what a forward was promised, also where an earlier one failed to put it there."""

import asyncio
import threading
from pathlib import Path

import torch

from moelet.layer.engine import Forward, LayerBatch
from plain_engine import PlainEngine, PlainService, output_of, plain_service, tokens


def test_a_forward_installs_what_an_earlier_one_failed_to(tmp_path: Path) -> None:
    """The second batch was formed while the first, which brings the adapters, had yet to fail."""

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
        answers = await asyncio.gather(*forwards)
        for names, answer in zip(("ab", None, "ba", None), answers, strict=True):
            hidden = tokens(1, 2) if names else tokens(3)
            expected = output_of(1, hidden, [codes[name] for name in names] if names else [0.0])
            assert torch.equal(answer.hidden_states, expected)
        assert sorted(batch.num_tokens for batch in plain.engine.begun) == [1, 2, 3]

    async def checked() -> None:
        async with plain_service(tmp_path, PlainEngine(depth=2)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())


def test_a_forward_that_is_begun_at_once_is_not_handed_over(tmp_path: Path) -> None:
    """It is begun where it is formed, unless the engine's thread has something to do, as an adapter to install."""
    threads: list[str] = []

    class Noting(PlainEngine):
        def begin(self, batch: LayerBatch) -> Forward:
            threads.append(threading.current_thread().name)
            return super().begin(batch)

    async def check(plain: PlainService) -> None:
        await plain.load("a")
        await plain.forward(tokens(1))
        await plain.forward(tokens(1), adapter="a")
        await plain.forward(tokens(1), adapter="a")
        assert threads == ["MainThread", "moelet-engine", "MainThread"]

    async def checked() -> None:
        async with plain_service(tmp_path, Noting(depth=2, begins_at_once=True)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())
