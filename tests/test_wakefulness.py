"""The event loop stays awake for a moment after an answer, no longer, and not while there is something to do."""

import asyncio
import time
from pathlib import Path

import pytest

from fast_requests import asking, unmade
from moelet.layer.reference import ReferenceEngine
from moelet.service import wakefulness
from moelet.service.wakefulness import STAY_S, Wakefulness
from plain_engine import PlainEngine, PlainService, plain_service, tokens
from raw_http import answered, connected
from running_service import OpenEngine, running


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a core for the client, wherever this runs."""
    monkeypatch.setattr(wakefulness, "usable_cores", lambda: 2)


class AtOnce(ReferenceEngine):
    """Begins forwards as a GPU's engine does."""

    begins_at_once = True


@pytest.fixture(scope="module")
def open_engine() -> OpenEngine:
    """Opens one."""
    return lambda model, weights, max_loras, max_lora_rank: AtOnce(
        model, weights, max_loras=max_loras, max_lora_rank=max_lora_rank
    )


class Looks:
    """Counts how often it is asked whether the loop is ``busy``."""

    def __init__(self) -> None:
        self.count = 0
        self.busy = False

    def __call__(self) -> bool:
        self.count += 1
        return self.busy


async def looks_after(looks: Looks, stay: Wakefulness, seconds: float) -> int:
    """How often it is looked within ``seconds`` after ``stay``, and that it is not any more then."""
    before = looks.count
    stay.stay()
    await asyncio.sleep(seconds)
    found = looks.count - before
    await asyncio.sleep(0.05)
    assert looks.count - before == found
    return found


def test_it_looks_until_its_time_is_over_and_again_after_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_s = 100 * STAY_S  # longer than a machine in a slow mood takes from one turn of the loop to the next
    monkeypatch.setattr(wakefulness, "STAY_S", stay_s)

    async def check() -> None:
        looks = Looks()
        awake = Wakefulness(asyncio.get_running_loop(), looks)
        for _ in range(3):
            assert await looks_after(looks, awake, 10 * stay_s) > 1

    asyncio.run(check())


def test_answers_in_a_row_are_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness, "STAY_S", 3600)

    async def check() -> None:
        looks = Looks()
        awake = Wakefulness(asyncio.get_running_loop(), looks)
        for _ in range(5):
            awake.stay()
        for turns in range(1, 4):
            await asyncio.sleep(0)
            assert looks.count == turns
        monkeypatch.setattr(wakefulness, "STAY_S", 0)
        awake.stay()
        await looks_after(looks, awake, 0.01)

    asyncio.run(check())


def test_work_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness, "STAY_S", 3600)

    async def check() -> None:
        looks = Looks()
        awake = Wakefulness(asyncio.get_running_loop(), looks)
        looks.busy = True
        assert await looks_after(looks, awake, 0.01) == 1

    asyncio.run(check())


def test_with_one_core_it_belongs_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness, "usable_cores", lambda: 1)

    async def check() -> None:
        looks = Looks()
        assert await looks_after(looks, Wakefulness(asyncio.get_running_loop(), looks), 0.01) == 0

    asyncio.run(check())


@pytest.mark.parametrize("begins_at_once", [False, True])
def test_one_request_is_waited_for_where_the_engine_needs_no_core_and_many_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_at_once: bool
) -> None:
    stays: list[float] = []
    monkeypatch.setattr(Wakefulness, "stay", lambda _self: stays.append(time.monotonic()))

    async def check(plain: PlainService) -> None:
        for one in (True, False, True):
            stays.clear()
            await asyncio.gather(*(plain.forward(tokens(i)) for i in range(1 if one else 4)))
            assert len(stays) == (one and begins_at_once)

    async def checked() -> None:
        async with plain_service(tmp_path, PlainEngine(begins_at_once=begins_at_once)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())


def test_while_one_request_is_computed_nobody_waits_for_the_next(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        first = asyncio.create_task(plain.forward(tokens(1)))
        await first
        with plain.engine.closed():
            second = asyncio.create_task(plain.forward(tokens(2)))
            await asyncio.sleep(50 * STAY_S)
            started = time.thread_time()
            await asyncio.sleep(0.3)
            assert time.thread_time() - started < 0.1
        await second

    async def checked() -> None:
        async with plain_service(tmp_path, PlainEngine(begins_at_once=True)) as plain:
            await asyncio.wait_for(check(plain), 30)

    asyncio.run(checked())


def test_a_service_that_nobody_asks_takes_no_time_of_a_core(open_engine: OpenEngine) -> None:
    with running(open_engine, None) as service, connected(service) as client:
        answered(client, asking(1))
        time.sleep(0.1)
        started = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - started < 0.2


def test_answers_are_the_same_awake_and_asleep(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[bytes]] = []
    for cores in (1, 2):
        monkeypatch.setattr(wakefulness, "usable_cores", lambda cores=cores: cores)
        with running(open_engine, None) as service, connected(service) as client:
            said.append([unmade(answered(client, asking(tokens))) for tokens in (1, 3, 1, 7)])
    assert said[0] == said[1]
