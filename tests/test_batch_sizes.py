"""How many tokens go into one call of the engine: of one request, of several, and with adapters among them."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

from plain_engine import PlainEngine, PlainService, output_of, plain_service, tokens


def sizes_of(root: Path, engine: PlainEngine, requests: list[tuple[int, str | None]], **limits: int) -> list[int]:
    """The tokens of the batches that ``requests`` (tokens, adapter) make which come together and are answered right."""

    async def served() -> None:
        async with plain_service(root, engine, **limits) as plain:
            await asyncio.wait_for(answered(plain), 30)

    async def answered(plain: PlainService) -> None:
        codes: dict[str | None, float] = {None: 0.0}
        for name in {name for _, name in requests if name}:
            codes[name] = await plain.load(name)
            await plain.forward(tokens(250), name)  # so that it is in its slot
        plain.engine.begun.clear()
        sent = [(tokens(*range(i, i + size)), name) for i, (size, name) in enumerate(requests)]
        answers = await asyncio.gather(*(plain.forward(hidden, name) for hidden, name in sent))
        for (hidden, name), answer in zip(sent, answers, strict=True):
            assert torch.equal(answer.hidden_states, output_of(1, hidden, [codes[name]] * len(hidden)))

    asyncio.run(served())
    return [batch.num_tokens for batch in engine.begun]


def test_a_request_is_one_call_of_as_many_tokens_as_the_engine_computes_as_one(tmp_path: Path) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=32)
    assert sizes_of(tmp_path, engine, [(32, None), (4, None), (4, None), (1, None)]) == [32, 8, 1]


def test_more_than_that_is_cut(tmp_path: Path) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=32)
    assert sorted(sizes_of(tmp_path, engine, [(70, "a")])) == [6, 32, 32]


def test_what_free_slots_may_cut_is_cut_to_where_no_bit_tells(tmp_path: Path) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=32, max_loras=2)

    async def served() -> None:
        async with plain_service(tmp_path, engine) as plain:
            codes = {name: await plain.load(name) for name in "abc"}
            names = ["abc"[i % 3] for i in range(30)]
            answer = await asyncio.wait_for(plain.forward(tokens(*range(30)), adapters=names), 30)
            wanted = output_of(1, tokens(*range(30)), [codes[name] for name in names])
            assert torch.equal(answer.hidden_states, wanted)

    asyncio.run(served())
    assert max(batch.num_tokens for batch in engine.begun) <= 8


def test_what_is_asked_for_bounds_both(tmp_path: Path) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=32)
    found = sizes_of(tmp_path, engine, [(40, None), (8, None), (7, None)], max_batch_tokens=16)
    assert sorted(found) == [7, 16, 16, 16]


@pytest.mark.parametrize(
    ("adapter", "max_batch_tokens", "waits"), [(None, 16, False), ("a", 8, False), ("a", 24, False), (None, 24, True)]
)
def test_a_batch_waits_for_more_only_where_it_can_grow(
    tmp_path: Path, adapter: str | None, max_batch_tokens: int, waits: bool
) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=64)

    async def second_batch_after() -> float:
        limits = {"max_batch_tokens": max_batch_tokens, "queue_delay_s": 0.5}
        async with plain_service(tmp_path, engine, **limits) as plain:
            await plain.load("a")
            await plain.forward(tokens(1), "a")
            with engine.closed():
                first = asyncio.ensure_future(plain.forward(tokens(1), adapter))
                while len(engine.begun) < 2:
                    await asyncio.sleep(0.001)
                start = time.monotonic()
                others = [asyncio.ensure_future(plain.forward(tokens(2, 2, 2, 2), adapter)) for _ in range(5)]
                while len(engine.begun) < 3:
                    await asyncio.sleep(0.001)
                took = time.monotonic() - start
            await asyncio.gather(first, *others)
            return took

    assert (asyncio.run(second_batch_after()) > 0.25) == waits


def test_with_adapters_no_more_go_together_than_leave_their_bits_alone(tmp_path: Path) -> None:
    engine = PlainEngine(batch_tokens=8, most_tokens=32)
    requests = [(6, "a"), (2, None), (2, "a"), (6, "a"), (12, "a"), (3, "a")]
    found = sizes_of(tmp_path, engine, requests, max_batch_tokens=24)
    assert sum(found) == sum(size for size, _ in requests)
    assert sorted(found, reverse=True)[0] == 12, "one request alone"
    assert sorted(found, reverse=True)[1] <= 8
    engine = PlainEngine(batch_tokens=8, most_tokens=32)
    assert sizes_of(tmp_path, engine, [(6, None), (10, None), (8, None)], max_batch_tokens=24) == [24]
