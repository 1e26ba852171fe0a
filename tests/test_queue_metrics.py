"""What counts as waiting: every request once, until something of it enters a batch, however it is computed."""

import asyncio
from pathlib import Path

import pytest
import torch

from moelet.layer.errors import EngineError
from moelet.service.errors import UnavailableError
from plain_engine import POISON, PlainEngine, PlainService, output_of, tokens
from test_batcher import begun, run

OVERSIZED = 50
"""Tokens of a request that takes seven batches, of eight tokens but the last, which has two."""
GAUGES = ("moelet_queue_requests", "moelet_queue_tokens", "vllm:num_requests_waiting")


def read(plain: PlainService, *names: str) -> list[float | None]:
    return [plain.service.metrics.registry.get_sample_value(name) for name in names]


def adapters_of(plain: PlainService) -> tuple[str, str]:
    """Those of requests that run and that wait."""
    [family] = [f for f in plain.service.metrics.registry.collect() if f.name == "vllm:lora_requests_info"]
    labels = family.samples[0].labels
    return labels["running_lora_adapters"], labels["waiting_lora_adapters"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_whose_first_part_is_computed_does_not_wait(tmp_path: Path, depth: int) -> None:
    """Its other rows do. Another then has the one place in the queue; a third is refused, and so is none too many."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "ab"}
        hidden = tokens(*range(OVERSIZED))
        with plain.engine.closed():
            large = asyncio.ensure_future(plain.forward(hidden, "a"))
            await begun(plain.engine, depth)
            rows = OVERSIZED - 8 * depth
            assert read(plain, *GAUGES) == [0, rows, 0]
            assert adapters_of(plain) == ("a", "")
            assert read(plain, "moelet_queue_seconds_count") == [1]
            plain.service.check_admission()
            small = asyncio.ensure_future(plain.forward(tokens(1, 2), "b"))
            await asyncio.sleep(0.01)
            assert read(plain, *GAUGES) == [1, rows + 2, 1]
            assert adapters_of(plain) == ("a", "b")
            with pytest.raises(UnavailableError, match="may hold 1 requests"):
                await plain.forward(tokens(3))
        assert torch.equal((await large).hidden_states, output_of(1, hidden, [codes["a"]] * OVERSIZED))
        assert torch.equal((await small).hidden_states, output_of(1, tokens(1, 2), [codes["b"]] * 2))
        assert read(plain, *GAUGES) == [0, 0, 0]
        assert read(plain, "moelet_queue_seconds_count", "moelet_batch_requests_sum") == [2, 8]
        assert [batch.num_tokens for batch in plain.engine.begun] == [8, 8, 8, 8, 8, 8, 2 + 2]

    run(tmp_path, check, PlainEngine(depth=depth), max_queue=1)


def test_a_request_in_parts_that_is_cancelled_leaves_the_queue_once(tmp_path: Path) -> None:
    """Whether something of it has been begun or not."""

    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            computed = asyncio.ensure_future(plain.forward(tokens(*[1] * OVERSIZED)))
            await begun(plain.engine, plain.engine.depth)
            rows = OVERSIZED - 8 * plain.engine.depth
            waits, last = (asyncio.ensure_future(plain.forward(tokens(*[2] * OVERSIZED))) for _ in range(2))
            await asyncio.sleep(0.01)
            assert read(plain, *GAUGES) == [2, rows + 2 * OVERSIZED, 2]
            for leaves, left in ((waits, [1, rows + OVERSIZED, 1]), (computed, [1, OVERSIZED, 1]), (last, [0, 0, 0])):
                leaves.cancel()
                await asyncio.sleep(0.01)
                assert read(plain, *GAUGES) == left
        assert read(plain, "moelet_queue_seconds_count") == [1]

    run(tmp_path, check)


def test_a_request_of_more_adapters_than_slots_is_observed_once(tmp_path: Path) -> None:
    """Also where two of its parts share a batch, which is then one forward's."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abcd"}
        names = [*"abcddddd", *"aaaa"]
        hidden = tokens(*range(len(names)))
        with plain.engine.closed():
            busy = asyncio.ensure_future(plain.forward(tokens(1), layer=3))
            await begun(plain.engine, 1)
            asked = asyncio.ensure_future(plain.forward(hidden, adapters=names))
            while not all(plain.service.adapters.table.current(name).ready for name in "abc"):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
        answer, _ = await asyncio.gather(asked, busy)
        assert torch.equal(answer.hidden_states, output_of(1, hidden, [codes[name] for name in names]))
        assert [len(tags) for tags in plain.engine.tags] == [1, 3 + 4, 5]
        assert read(plain, "moelet_queue_seconds_count", "moelet_batch_requests_sum") == [2, 3]

    run(tmp_path, check, PlainEngine(depth=1))


def test_a_request_that_is_computed_again_is_observed_once(tmp_path: Path) -> None:
    """Alone, after a batch failed that it was in."""

    async def check(plain: PlainService) -> None:
        sent = [tokens(tag) for tag in (1, POISON, 3)]
        answers = await asyncio.gather(*map(plain.forward, sent), return_exceptions=True)
        assert [isinstance(answer, EngineError) for answer in answers] == [False, True, False]
        assert [len(tags) for tags in plain.engine.tags] == [3, 1, 1, 1]
        assert read(plain, "moelet_queue_seconds_count", "moelet_batch_requests_sum") == [3, 6]

    run(tmp_path, check)
