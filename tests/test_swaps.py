"""Adapters on their way into slots: who is answered meanwhile, who waits, and whom a failure or a departure reaches."""

import asyncio
import random
import threading
from pathlib import Path

import pytest
import torch

from moelet.layer.errors import EngineError, EngineFailedError
from moelet.service.deadline import DeadlineExceededError
from moelet.service.swaps import MOST_ROUNDS
from plain_engine import PlainEngine, PlainService, output_of, tokens
from test_batcher import begun, run


async def installing(plain: PlainService, name: str) -> None:
    """Wait until ``name`` is on its way into a slot."""
    while not plain.service.adapters.table.current(name).installing:
        await asyncio.sleep(0.001)


def right(answer: object, hidden: torch.Tensor, *codes: float, layer: int = 1) -> bool:
    return torch.equal(answer.hidden_states, output_of(layer, hidden, codes))  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [1, 2])
def test_others_are_answered_while_an_adapter_is_installed(tmp_path: Path, depth: int) -> None:
    """Base rows, adapters that are in their slots, and other layers; many batches of them."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "ab"}
        await plain.forward(tokens(0), "a")
        with plain.engine.installing_closed():
            waiting = asyncio.ensure_future(plain.forward(tokens(1, 2), adapters=["b", "a"]))
            await installing(plain, "b")
            for tag in range(4 * MOST_ROUNDS):
                for layer in (1, 3):
                    assert right(await plain.forward(tokens(tag), layer=layer), tokens(tag), 0, layer=layer)
                    assert right(
                        await plain.forward(tokens(tag), "a", layer=layer), tokens(tag), codes["a"], layer=layer
                    )
            assert not waiting.done()
            assert plain.service.metrics.registry.get_sample_value("moelet_queue_requests") == 1
        assert right(await waiting, tokens(1, 2), codes["b"], codes["a"])
        read = plain.service.metrics.registry.get_sample_value
        assert read("moelet_adapter_installs_total") == read("moelet_adapter_install_seconds_count") == 2

    run(tmp_path, check, PlainEngine(depth=depth, max_loras=2))


def test_many_that_wait_for_one_adapter_are_answered_together(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        code = await plain.load("a")
        with plain.engine.installing_closed():
            waiting = [asyncio.ensure_future(plain.forward(tokens(i), "a")) for i in range(8)]
            await installing(plain, "a")
            await plain.forward(tokens(100))
        for i, answer in enumerate(await asyncio.gather(*waiting)):
            assert right(answer, tokens(i), code)
        assert plain.engine.tags == [[100.0], [float(i) for i in range(8)]]
        assert len(plain.engine.installed) == 1

    run(tmp_path, check)


def test_an_adapter_that_came_for_a_part_stays_until_it_ran(tmp_path: Path) -> None:
    """In the one slot, while others want it and the engine is busy; each adapter is installed once."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abcde"}
        with plain.engine.closed():
            busy = [asyncio.ensure_future(plain.forward(tokens(*[i] * 8))) for i in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            waiting = [asyncio.ensure_future(plain.forward(tokens(i), name)) for i, name in enumerate("abcde")]
            while not plain.service.adapters.table.current("a").ready:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert [code for _, code in plain.engine.installed] == [codes["a"]]
        for i, answer in enumerate(await asyncio.gather(*waiting, *busy)):
            assert i >= 5 or right(answer, tokens(i), codes["abcde"[i]])
        assert [code for _, code in plain.engine.installed] == [codes[name] for name in "abcde"]

    run(tmp_path, check, PlainEngine(max_loras=1))


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_who_leaves_during_an_install_lets_go_of_all(tmp_path: Path, how: str) -> None:
    """Of the slots of its other adapters at once, which one that waits gets, and of its own once it is installed."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abc"}
        table = plain.service.adapters.table
        await plain.forward(tokens(0), "a")
        with plain.engine.installing_closed():
            leaves = asyncio.ensure_future(
                plain.forward(tokens(1, 1), adapters=["a", "b"], timeout_s=0.1 if how == "deadline" else None)
            )
            await installing(plain, "b")
            waits = asyncio.ensure_future(plain.forward(tokens(2), "c"))
            await asyncio.sleep(0.01)
            assert table.current("a").holds == 1
            assert table.current("c").slot is None
            if how == "cancel":
                leaves.cancel()
            with pytest.raises(DeadlineExceededError if how == "deadline" else asyncio.CancelledError):
                await leaves
            await installing(plain, "c")
            assert (table.current("a").slot, table.current("b").holds, table.current("b").in_flight) == (None, 0, 0)
            assert right(await plain.forward(tokens(3)), tokens(3), 0)
        assert right(await waits, tokens(2), codes["c"])
        assert plain.engine.tags == [[0.0], [3.0], [2.0]]
        assert right(await plain.forward(tokens(4), "b"), tokens(4), codes["b"])

    run(tmp_path, check, PlainEngine(max_loras=2))


def test_an_install_that_fails_hurts_those_who_need_it_alone(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abc"}
        await plain.forward(tokens(0), "a")
        plain.engine.refuses.add(codes["b"])
        with plain.engine.installing_closed():
            needing = [
                asyncio.ensure_future(plain.forward(tokens(1), "b")),
                asyncio.ensure_future(plain.forward(tokens(*range(20)), adapters=[*"ab" * 10])),
                asyncio.ensure_future(plain.forward(tokens(1, 2, 3), adapters=["c", "a", "b"])),
            ]
            others = [asyncio.ensure_future(plain.forward(tokens(i, i), adapters=["a", "c"])) for i in (4, 5)]
            await installing(plain, "b")
            assert right(await plain.forward(tokens(6), "a"), tokens(6), codes["a"])
        for error in await asyncio.gather(*needing, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert "out of memory" in str(error)
        for i, answer in zip((4, 5), await asyncio.gather(*others), strict=True):
            assert right(answer, tokens(i, i), codes["a"], codes["c"])
        assert plain.service.adapters.table.current("b").slot is None
        assert plain.service.metrics.registry.get_sample_value("moelet_adapter_install_seconds_count") == 2
        plain.engine.refuses.clear()
        assert right(await plain.forward(tokens(7), "b"), tokens(7), codes["b"])

    run(tmp_path, check, PlainEngine(max_loras=2))


def test_what_is_replaced_or_unloaded_during_its_install_serves_who_waits_and_is_cleared(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "ab"}
        table = plain.service.adapters.table
        with plain.engine.installing_closed():
            waiting = [asyncio.ensure_future(plain.forward(tokens(i), name)) for i, name in enumerate("ab")]
            await installing(plain, "a")
            new = await plain.load("a", replace=True)
            waiting.append(asyncio.ensure_future(plain.forward(tokens(2), "a")))
            gone = asyncio.ensure_future(plain.forward(tokens(3), "b"))
            await asyncio.sleep(0.01)
            for each in (waiting.pop(1), gone):
                each.cancel()
            await asyncio.sleep(0.01)
            await plain.service.adapters.unload("b", 5)
            assert {version.name for version in table.retired} == {"a", "b"}
        first, second = await asyncio.gather(*waiting)
        assert right(first, tokens(0), codes["a"])
        assert right(second, tokens(2), new)
        await plain.settled()
        plain.service.engine.clear(0).result()
        assert sorted(code for code in plain.engine._slots if code is not None) == [new]
        assert [version.name for version in table.slot_table() if version] == ["a"]

    run(tmp_path, check, PlainEngine(max_loras=2))


def test_an_engine_that_fails_during_an_install_fails_who_waits_for_it(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        for name in "abcd":
            await plain.load(name)
        with plain.engine.installing_closed():
            waiting = [asyncio.ensure_future(plain.forward(tokens(i), name)) for i, name in enumerate("abcd")]
            await installing(plain, "a")
            plain.engine.error = EngineFailedError("the device fell off the bus")
            with pytest.raises(EngineFailedError):
                await plain.forward(tokens(9))
            answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(answer) for answer in answers} == {"the device fell off the bus"}
        await plain.settled()
        assert all(version.holds == 0 for version in plain.service.adapters.table)

    run(tmp_path, check, PlainEngine(max_loras=2))


def test_a_full_house_that_never_rests_lets_who_waits_have_a_slot(tmp_path: Path) -> None:
    """Two adapters in two slots are asked for all the time, and a part that needs two others is served all the same."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abyz"}
        stop = False

        async def popular(name: str) -> None:
            while not stop:
                assert right(await plain.forward(tokens(1, 1, 1), name), tokens(1, 1, 1), *[codes[name]] * 3)

        rush = [asyncio.ensure_future(popular(name)) for name in "ab" * 6]
        await begun(plain.engine, 10)
        answer = await plain.forward(tokens(2, 3), adapters=["y", "z"])
        assert right(answer, tokens(2, 3), codes["y"], codes["z"])
        stop = True
        await asyncio.gather(*rush)

    run(tmp_path, check, PlainEngine(max_loras=2))


def test_who_waits_for_an_install_of_another_keeps_nobody_waiting(tmp_path: Path) -> None:
    """One slot has what is asked for all the time, the other is being filled: the third adapter comes next, and its
    request does not stop those of the first for as long as the install takes."""

    async def check(plain: PlainService) -> None:
        codes = {name: await plain.load(name) for name in "abc"}
        stop = False

        async def popular() -> None:
            while not stop:
                await plain.forward(tokens(1, 1, 1), "a")

        await plain.forward(tokens(1), "a")
        rush = [asyncio.ensure_future(popular()) for _ in range(6)]
        with plain.engine.installing_closed():
            waiting = []
            for name in "bc":
                waiting.append(asyncio.ensure_future(plain.forward(tokens(2), name)))
                await installing(plain, "b")
            await begun(plain.engine, len(plain.engine.begun) + 4 * MOST_ROUNDS)
            assert plain.service.adapters.table.current("c").slot is None
        for name, answer in zip("bc", await asyncio.gather(*waiting), strict=True):
            assert right(answer, tokens(2), codes[name])
        stop = True
        await asyncio.gather(*rush)

    run(tmp_path, check, PlainEngine(max_loras=2))


@pytest.mark.parametrize("begins_at_once", [False, True])
def test_one_slot_serves_many_adapters_whoever_leaves(tmp_path: Path, begins_at_once: bool) -> None:
    async def check(plain: PlainService) -> None:
        chance = random.Random(7)
        codes = {name: await plain.load(name) for name in "abcdef"}

        async def client(number: int) -> None:
            for turn in range(20):
                names = [chance.choice("abcdef") for _ in range(chance.choice((1, 1, 3, 12)))]
                hidden = tokens(*[number] * len(names))
                asked = asyncio.ensure_future(plain.forward(hidden, adapters=names))
                if turn % 4 == 3:
                    await asyncio.sleep(chance.random() * 0.002)
                    asked.cancel()
                    continue
                assert right(await asked, hidden, *[codes[name] for name in names])

        await asyncio.gather(*(client(number) for number in range(12)))

    run(tmp_path, check, PlainEngine(max_loras=1, begins_at_once=begins_at_once))


def test_stopping_waits_for_an_install_under_way(tmp_path: Path) -> None:
    plain = PlainService(PlainEngine(), tmp_path)

    async def check() -> None:
        await plain.service.start()
        await plain.load("a")
        plain.engine._install_gate.clear()
        waiting = asyncio.ensure_future(plain.forward(tokens(1), "a"))
        await installing(plain, "a")
        waiting.cancel()
        stopping = asyncio.ensure_future(plain.service.stop())
        await asyncio.sleep(0.02)
        assert not stopping.done()
        plain.engine._install_gate.set()
        await asyncio.wait_for(stopping, 10)
        assert not {"moelet-slots", "moelet-engine"} & {thread.name for thread in threading.enumerate()}

    asyncio.run(check())
