"""Bounds of what waits: deadlines, a full queue, cancelled requests, and ten thousand cycles that leave nothing."""

import asyncio
import gc
import time
from pathlib import Path

import pytest
import torch

from moelet.layer.errors import AdapterCapacityError, RequestError
from moelet.service.deadline import DeadlineExceededError, Timeouts
from moelet.service.errors import UnavailableError
from plain_engine import DIGIT, PlainEngine, PlainService, output_of, tokens
from test_batcher import begun, run


@pytest.mark.parametrize("sent", ["", "0", "0.0", "-1", "1e3", "ten", "nan", "inf", "1 ", "٣", "+5", "1,5"])
def test_a_header_that_is_no_number_of_milliseconds(sent: str) -> None:
    with pytest.raises(RequestError, match="X-Request-Timeout-Ms should be") as raised:
        Timeouts(60).from_header(sent)
    assert raised.value.param == "X-Request-Timeout-Ms"


def test_no_deadline_is_later_than_the_service_allows() -> None:
    timeouts = Timeouts(60)
    sent = {None: 60, "250": 0.25, "0.5": 5e-4, "0.5000000": 5e-4, "999999999999": 60, "9" * 30: 60}
    assert {each: timeouts.from_header(each).timeout_s for each in sent} == sent
    now = time.monotonic()
    deadline = timeouts.from_header("250")
    assert now + 0.2 < deadline.at < now + 1
    assert deadline.within(None) is deadline.within(250_000) is deadline.within(10**30) is deadline
    sooner = deadline.within(1000)
    assert (sooner.timeout_s, sooner.at) == (pytest.approx(1e-3), pytest.approx(deadline.at - 0.249))


def test_a_request_past_its_deadline_is_not_started(tmp_path: Path) -> None:
    """Neither while the engine computes something else, nor when it is free again."""

    async def check(plain: PlainService) -> None:
        await plain.load("a")
        with pytest.raises(DeadlineExceededError, match=r"within its 0\.001 ms"):
            await plain.forward(tokens(1), timeout_s=1e-6)
        with plain.engine.closed():
            first = [asyncio.ensure_future(plain.forward(tokens(*[2] * 8))) for _ in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            with pytest.raises(DeadlineExceededError):
                await asyncio.wait_for(plain.forward(tokens(3), "a", timeout_s=0.05), 5)
            with pytest.raises(DeadlineExceededError):
                await asyncio.wait_for(plain.forward(tokens(*[3] * 30), timeout_s=0.05), 5)
            assert plain.service.adapters.in_flight("a") == 0
            late = asyncio.ensure_future(plain.forward(tokens(4), timeout_s=0.05))
            await asyncio.sleep(0)
            time.sleep(0.06)  # the event loop is late, and the sweep with it
        with pytest.raises(DeadlineExceededError):
            await late
        await asyncio.gather(*first)
        assert {tag for tags in plain.engine.tags for tag in tags} == {2}

    run(tmp_path, check)


def test_a_request_that_is_computed_too_late_is_told_so_at_its_deadline(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        await plain.load("a")
        with plain.engine.closed():
            with pytest.raises(DeadlineExceededError):
                await asyncio.wait_for(plain.forward(tokens(1), "a", timeout_s=0.05), 5)
            assert plain.service.adapters.in_flight("a") == 0
            assert [v.holds for v in plain.service.adapters.table] == [1]
        while plain.service.adapters.table.current("a").holds:
            await asyncio.sleep(0.001)

    run(tmp_path, check)


def test_a_full_queue_refuses_and_recovers(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            running = [asyncio.ensure_future(plain.forward(tokens(*[1] * 8))) for _ in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            waiting = [asyncio.ensure_future(plain.forward(tokens(2))) for _ in range(4)]
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="may hold 4 requests") as refused:
                await plain.forward(tokens(3))
            assert refused.value.retry_after_s >= 1
            with pytest.raises(UnavailableError, match="may hold 4 requests"):
                plain.service.check_admission()
            waiting.pop().cancel()
            await asyncio.sleep(0.01)
            waiting.append(asyncio.ensure_future(plain.forward(tokens(4))))
            await asyncio.sleep(0.01)
        await asyncio.gather(*running, *waiting)
        await plain.forward(tokens(5))
        assert plain.engine.tags == [[1.0] * 8] * plain.engine.depth + [[2.0, 2.0, 2.0, 4.0], [5.0]]

    run(tmp_path, check, max_queue=4)


def test_a_queue_is_full_by_bytes_too(tmp_path: Path) -> None:
    row = tokens(1).nbytes

    async def check(plain: PlainService) -> None:
        with plain.engine.closed():
            running = [asyncio.ensure_future(plain.forward(tokens(*[1] * 8))) for _ in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            large = asyncio.ensure_future(plain.forward(tokens(*[2] * 50)))  # alone it may be larger
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match=f"holds {50 * row}"):
                await plain.forward(tokens(3))
        await asyncio.gather(*running, large)
        await plain.forward(tokens(3))

    run(tmp_path, check, max_queue_bytes=20 * row)


def test_a_cancelled_request_is_not_begun_and_holds_nothing(tmp_path: Path) -> None:
    async def check(plain: PlainService) -> None:
        await plain.load("a")
        with plain.engine.closed():
            running = [asyncio.ensure_future(plain.forward(tokens(*[1] * 8), "a")) for _ in range(plain.engine.depth)]
            await begun(plain.engine, plain.engine.depth)
            waiting = [asyncio.ensure_future(plain.forward(tokens(*[2] * size), "a")) for size in (1, 30)]
            stays = asyncio.ensure_future(plain.forward(tokens(3), "a"))
            await asyncio.sleep(0.01)
            for each in (*waiting, running[0]):
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert plain.service.adapters.in_flight("a") == len(running)
        await asyncio.gather(*running[1:], stays)
        assert plain.engine.tags[len(running) :] == [[3.0]]

    run(tmp_path, check)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")])
def test_no_memory_for_an_adapter_is_a_refusal_that_changes_nothing(tmp_path: Path, error: Exception) -> None:
    async def check(plain: PlainService) -> None:
        code = await plain.load("a")
        plain.failing_read = error
        for name in ("a", "b"):
            with pytest.raises(AdapterCapacityError, match="memory"):
                await plain.load(name, replace=True)
        answer = await plain.forward(tokens(1), "a")
        assert torch.equal(answer.hidden_states, output_of(1, tokens(1), [code]))
        assert [version.name for version in plain.service.adapters.table] == ["a"]

    run(tmp_path, check)


def test_ten_thousand_cycles_leave_nothing_behind(tmp_path: Path) -> None:
    """Loads, replaces, evictions, unloads, and forwards, cancelled ones too: as many objects at the end as before."""

    one, two = tokens(1), tokens(3, 4)

    async def cycles(plain: PlainService, number: int, prefix: str = "n") -> None:
        for i in range(number):
            name = f"{prefix}{i % 5}"
            code = await plain.load(name, replace=True)
            gone = asyncio.ensure_future(plain.forward(two, name, timeout_s=1e-6 if i % 2 else 5))
            answer = await plain.forward(one, name)
            gone.cancel()
            assert answer.hidden_states[0].tolist() == [1, 1, code % DIGIT, code // DIGIT, 0, 0, 0, 0]
            if i % 3 == 0:
                await plain.service.adapters.unload(name, 5)

    async def check(plain: PlainService) -> None:
        async def settled() -> int:
            while plain.service.lifecycle.in_flight:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            plain.engine.begun.clear()
            plain.engine.installed.clear()
            gc.collect()
            return len(gc.get_objects())

        await cycles(plain, 400)
        before = await settled()
        await asyncio.gather(*(cycles(plain, 1200, f"m{lane}-") for lane in range(8)))
        assert await settled() - before < 200
        for version in list(plain.service.adapters.table):
            await plain.service.adapters.unload(version.name, 5)
        await plain.settled()
        assert plain.service.adapters.table.slot_table() == [None] * 3
        while plain.engine._slots != [None] * 3:
            await asyncio.sleep(0.01)

    run(tmp_path, check, PlainEngine(depth=2), timeout_s=100, max_cpu_loras=24)


def test_what_cannot_be_counted_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And answered in its turn, by an engine that begins at once too."""

    def uncounted(*_: object) -> None:
        raise RuntimeError("it cannot be counted")

    async def check(plain: PlainService) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for name in ("batch_begun", "batch_ended"):
            monkeypatch.setattr(plain.service.metrics, name, uncounted)
        code = await plain.load("a")
        for tag in range(3 * plain.engine.depth):
            answer = await plain.forward(tokens(tag), "a", timeout_s=5)
            assert torch.equal(answer.hidden_states, output_of(1, tokens(tag), [code]))

    for begins_at_once in (False, True):
        run(tmp_path, check, PlainEngine(begins_at_once=begins_at_once))
