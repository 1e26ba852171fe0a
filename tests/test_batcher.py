"""Batches across requests: what goes together, what is cut and rejoined, whose turn it is, and whom failures reach."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from moelet.layer.errors import EngineError, EngineFailedError
from moelet.service.waiting import MOST_PASSES
from plain_engine import EXPERTS, POISON, TOP_K, PlainEngine, PlainService, output_of, plain_service, tokens

Check = Callable[[PlainService], Awaitable[None]]


def run(root: Path, check: Check, engine: PlainEngine | None = None, timeout_s: float = 30, **options: object) -> None:
    """``check`` over a service that is idle in the end."""

    async def checked() -> None:
        async with plain_service(root, engine, **options) as plain:  # type: ignore[arg-type]
            await asyncio.wait_for(check(plain), timeout_s)

    asyncio.run(checked())


async def begun(engine: PlainEngine, batches: int) -> None:
    """Wait until the engine has begun so many."""
    while len(engine.begun) < batches:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("depth", "begins_at_once"), [(1, False), (2, False), (2, True)])
def test_requests_that_come_together_are_one_batch(tmp_path: Path, depth: int, begins_at_once: bool) -> None:
    async def check(plain: PlainService) -> None:
        answers = await asyncio.gather(*(plain.forward(tokens(i)) for i in range(8)))
        assert plain.engine.tags == [[float(i) for i in range(8)]]
        for i, answer in enumerate(answers):
            assert torch.equal(answer.hidden_states, output_of(1, tokens(i), [0.0]))

    run(tmp_path, check, PlainEngine(depth=depth, begins_at_once=begins_at_once))


def test_layers_and_ways_of_routing_go_apart(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        ids, weights = torch.zeros(1, TOP_K, dtype=torch.int32), torch.ones(1, TOP_K)
        logits = torch.ones(1, EXPERTS)
        ways = [{}, {"topk_ids": ids, "topk_weights": weights}, {"router_logits": logits}]
        forwards = [(tokens(tag), layer, way) for tag in (1, 2) for layer in (1, 3) for way in ways]
        answers = await asyncio.gather(*(plain.forward(h, layer=layer, **way) for h, layer, way in forwards))
        for (hidden, layer, _), answer in zip(forwards, answers, strict=True):
            assert torch.equal(answer.hidden_states, output_of(layer, hidden, [0.0]))
        sent = [
            (b.layer, b.topk_ids is not None, b.router_logits is not None, b.num_tokens) for b in plain.engine.begun
        ]
        assert len(sent) == len(set(sent)) == 6
        assert {tokens for *_, tokens in sent} == {2}
        for batch in plain.engine.begun:
            assert batch.topk_ids is None or torch.equal(batch.topk_ids, ids.repeat(2, 1))
            assert batch.topk_weights is None or torch.equal(batch.topk_weights, weights.repeat(2, 1))
            assert batch.router_logits is None or torch.equal(batch.router_logits, logits.repeat(2, 1))

    run(tmp_path, check)


def test_a_request_larger_than_a_batch_is_cut_and_rejoined(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abcdef"} | {None: 0.0}
        names = random.Random(4).choices(list(codes), k=61)
        hidden = tokens(*range(61))
        large = plain.forward(hidden, adapters=names)
        small = plain.forward(tokens(200), "a")
        whole, other = await asyncio.gather(large, small)
        assert torch.equal(whole.hidden_states, output_of(1, hidden, [codes[name] for name in names]))
        assert torch.equal(other.hidden_states, output_of(1, tokens(200), [codes["a"]]))
        assert whole.adapter_versions == dict.fromkeys("abcdef", 1)
        assert max(batch.num_tokens for batch in plain.engine.begun) <= 8

    run(tmp_path, check)


def test_more_adapters_than_slots_some_of_them_pinned(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name, pinned=name in "ab") for name in "abcdef"}
        for name in "ab":
            await plain.forward(tokens(0), name)
        for _ in range(3):
            names = [*"abcdef", *"fedcba"]
            together = plain.forward(tokens(*range(12)), adapters=names)
            alone = [plain.forward(tokens(i), name) for i, name in enumerate(names)]
            first, *others = await asyncio.gather(together, *alone)
            assert torch.equal(first.hidden_states, output_of(1, tokens(*range(12)), [codes[n] for n in names]))
            for i, answer in enumerate(others):
                assert torch.equal(answer.hidden_states[0], first.hidden_states[i])

    run(tmp_path, check)


def test_a_layer_does_not_wait_for_the_rush_of_another(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            rush = [asyncio.ensure_future(plain.forward(tokens(i))) for i in range(80)]
            await asyncio.sleep(0.01)
            late = asyncio.ensure_future(plain.forward(tokens(99), layer=3))
            await asyncio.sleep(0.01)
        await asyncio.gather(*rush, late)
        assert [batch.layer for batch in plain.engine.begun].index(3) <= plain.engine.depth + 1

    run(tmp_path, check)


@pytest.mark.parametrize("layer", [1, 3])
def test_an_adapter_gets_its_slot_however_busy_the_others_are(tmp_path: Path, layer: int) -> None:
    """Each batch has all three slots; the fourth adapter, on the same layer or another, is served all the same."""

    async def check(plain: PlainService) -> None:
        for name in "abcz":
            await plain.load(name)
        stop = False

        async def popular(tag: int) -> None:
            while not stop:
                await plain.forward(tokens(*[tag] * 6), adapters="abcabc")

        rush = [asyncio.ensure_future(popular(i)) for i in range(8)]
        await begun(plain.engine, 10)
        before = len(plain.engine.begun)
        await plain.forward(tokens(99), "z", layer=layer)
        at = next(i for i, tags in enumerate(plain.engine.tags) if 99 in tags)
        stop = True
        await asyncio.gather(*rush)
        assert at - before <= 2 * MOST_PASSES + 8

    run(tmp_path, check, timeout_s=20)


def test_small_requests_do_not_pass_a_large_one_for_ever(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            first = [asyncio.ensure_future(plain.forward(tokens(1, 1, 1))) for _ in range(3)]
            large = asyncio.ensure_future(plain.forward(tokens(*[8] * 8)))
            small = [asyncio.ensure_future(plain.forward(tokens(2))) for _ in range(400)]
            await asyncio.sleep(0.01)
        await asyncio.gather(*first, large, *small)
        assert [tags[0] for tags in plain.engine.tags].index(8) <= MOST_PASSES + 2

    run(tmp_path, check)


def test_the_next_batch_is_begun_while_one_computes_and_no_more_than_the_depth(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            forwards = []
            for tag in range(5):
                forwards.append(asyncio.ensure_future(plain.forward(tokens(tag))))
                await asyncio.sleep(0.02)
            assert plain.engine.tags == [[0.0], [1.0]]
        await asyncio.gather(*forwards)
        assert plain.engine.tags == [[0.0], [1.0], [2.0, 3.0, 4.0]]

    run(tmp_path, check)


def test_a_delay_fills_batches_only_while_the_engine_is_busy(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        await asyncio.wait_for(plain.forward(tokens(9)), 5)  # an idle engine is not kept waiting
        with plain.engine.closed():
            first = asyncio.ensure_future(plain.forward(tokens(0)))
            await begun(plain.engine, 2)
            waiting = [asyncio.ensure_future(plain.forward(tokens(i))) for i in (1, 2)]
            await asyncio.sleep(0.05)
            assert len(plain.engine.begun) == 2
            waiting += [asyncio.ensure_future(plain.forward(tokens(*[3] * 6)))]
            await begun(plain.engine, 3)  # full
        await asyncio.gather(first, *waiting)
        assert plain.engine.tags == [[9.0], [0.0], [1.0, 2.0, *[3.0] * 6]]

    run(tmp_path, check, queue_delay_s=20.0)


def test_only_the_guilty_of_a_batch_fails(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        tags = [1.0, 2.0, POISON, 3.0, 4.0]
        answers = await asyncio.gather(*(plain.forward(tokens(tag)) for tag in tags), return_exceptions=True)
        for tag, answer in zip(tags, answers, strict=True):
            if tag == POISON:
                assert isinstance(answer, EngineError)
                assert "poisoned" in str(answer)
            else:
                assert not isinstance(answer, BaseException)
                assert torch.equal(answer.hidden_states, output_of(1, tokens(tag), [0.0]))
        large = plain.forward(tokens(*[7.0] * 20, POISON))
        with pytest.raises(EngineError, match="poisoned"):
            await large
        assert (await plain.forward(tokens(5))).hidden_states[0, 0] == 5

    run(tmp_path, check)


def test_an_output_of_the_wrong_size_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        plain.engine.lost_rows = 1
        answers = await asyncio.gather(*(plain.forward(tokens(i, i)) for i in range(3)), return_exceptions=True)
        assert {str(answer) for answer in answers} == {"the engine answered 2 tokens with 1"}
        plain.engine.lost_rows = 0
        assert (await plain.forward(tokens(5))).hidden_states[0, 0] == 5

    run(tmp_path, check)


def test_a_batch_that_cannot_be_begun_takes_no_other_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(plain: PlainService) -> None:
        await plain.load("a")
        with plain.engine.closed():
            first = [asyncio.ensure_future(plain.forward(tokens(*[i] * 8))) for i in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            broken = [asyncio.ensure_future(plain.forward(tokens(*[9] * 8), "a")) for _ in range(3)]
            await asyncio.sleep(0.01)
            with monkeypatch.context() as patched:
                patched.setattr(plain.service.engine, "begin", lambda _batch: [][0])
                plain.engine._gate.set()
                told = await asyncio.gather(*broken, return_exceptions=True)
                assert [type(each) for each in told] == [IndexError] * 3
        await asyncio.gather(*first)
        await plain.forward(tokens(5), "a")
        assert "could not be begun" in caplog.text

    run(tmp_path, check)


def test_an_adapter_that_cannot_be_installed_fails_its_own_requests_alone(tmp_path: Path) -> None:
    """Also where a second batch was formed that counted on the slot, while the first had yet to fail."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abc"}
        plain.engine.refuses.add(codes["b"])
        for _ in range(3):
            with plain.engine.closed():
                first = [asyncio.ensure_future(plain.forward(tokens(i), name)) for i, name in enumerate("abc")]
                await asyncio.sleep(0.01)
                second = [asyncio.ensure_future(plain.forward(tokens(i), name)) for i, name in enumerate("cba")]
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*first, *second, return_exceptions=True)
            for i, name, answer in zip((0, 1, 2) * 2, "abccba", answers, strict=True):
                if name == "b":
                    assert "out of memory" in str(answer)
                else:
                    assert not isinstance(answer, BaseException)
                    assert torch.equal(answer.hidden_states, output_of(1, tokens(i), [codes[name]]))
        plain.engine.refuses.clear()
        assert torch.equal((await plain.forward(tokens(5), "b")).hidden_states, output_of(1, tokens(5), [codes["b"]]))

    run(tmp_path, check)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_that_fails_for_good_fails_all_that_runs_and_waits(tmp_path: Path, depth: int) -> None:
    async def check(plain: PlainService) -> None:
        await plain.load("a")
        with plain.engine.closed():
            forwards = []
            for i in range(20):
                forwards.append(asyncio.ensure_future(plain.forward(tokens(*[i] * 3), "a" if i % 2 else None)))
                await asyncio.sleep(0)
            await begun(plain.engine, depth)
            plain.engine.error = EngineFailedError("the device fell off the bus")
        answers = await asyncio.gather(*forwards, return_exceptions=True)
        assert {(type(answer), str(answer)) for answer in answers} == {
            (EngineFailedError, "the device fell off the bus")
        }
        assert len(plain.engine.begun) == depth
        assert plain.service.lifecycle.state == "failed"
        while plain.service.adapters.table.current("a").holds:
            await asyncio.sleep(0.001)

    run(tmp_path, check, PlainEngine(depth=depth))


@pytest.mark.parametrize(("depth", "begins_at_once"), [(1, False), (2, False), (3, False), (2, True)])
def test_random_traffic_of_every_size_and_adapter(tmp_path: Path, depth: int, begins_at_once: bool) -> None:
    async def check(plain: PlainService) -> None:
        chance = random.Random(depth)
        codes: dict[str | None, float] = {name: await plain.load(name, pinned=name == "a") for name in "abcdef"}
        codes[None] = 0.0

        async def client(number: int) -> None:
            for _ in range(25):
                size = chance.choice((1, 1, 2, 5, 21))
                names = [chance.choice(list(codes)) for _ in range(size)]
                layer, hidden = chance.choice((1, 3)), tokens(*[number] * size)
                answer = await plain.forward(hidden, adapters=names, layer=layer)
                assert torch.equal(answer.hidden_states, output_of(layer, hidden, [codes[name] for name in names]))

        await asyncio.gather(*(client(number) for number in range(16)))

    run(tmp_path, check, PlainEngine(depth=depth, batch_tokens=16, begins_at_once=begins_at_once))
