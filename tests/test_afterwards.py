"""What waits until there is time for it: soon done, in its order, and before anybody asks for what it counts."""

import asyncio
import logging

import pytest

from fast_requests import asking
from moelet.service import afterwards
from moelet.service.afterwards import MOST, Afterwards
from raw_http import answered, connected
from running_service import OpenEngine, RunningService, running


def test_all_is_done_soon_in_its_order() -> None:
    async def check() -> None:
        later, done = Afterwards(), list[int]()
        for number in range(3):
            later(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == []
        await asyncio.sleep(10 * afterwards.WAIT_S)
        assert done == [0, 1, 2]
        later(lambda: done.append(3))
        await asyncio.sleep(10 * afterwards.WAIT_S)
        assert done == [0, 1, 2, 3]

    asyncio.run(check())


def test_no_more_waits_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afterwards, "WAIT_S", 3600)

    async def check() -> None:
        later, done = Afterwards(), list[int]()
        for number in range(MOST + 1):
            later(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == list(range(MOST))

    asyncio.run(check())


def test_one_that_fails_is_told_of_and_keeps_no_other_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        later, done = Afterwards(), list[str]()
        later(lambda: done.append("before"))
        later(lambda: [][0])
        later(lambda: done.append("behind"))
        later.catch_up()
        assert done == ["before", "behind"]

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    assert "IndexError" in caplog.text


def ended(service: RunningService) -> list[float | None]:
    """Forwards in flight, those that were answered, and batches, as the registry has them."""
    names = ("moelet_requests_in_flight", "moelet_requests_total", "moelet_forward_seconds_count")
    labels = {"moelet_requests_total": {"layer": "1", "outcome": "ok"}}
    return [service.service.metrics.registry.get_sample_value(name, labels.get(name, {})) for name in names]


def test_a_scrape_and_the_end_of_the_service_wait_for_nothing(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(afterwards, "WAIT_S", 3600)
    with running(open_engine, None) as service, connected(service) as client:
        answered(client, asking(1))
        assert ended(service) == [1, None, 0]
        scraped = service.client.get("/metrics").text
        assert "moelet_requests_in_flight 0.0" in scraped
        assert ended(service) == [0, 1, 1]
        answered(client, asking(1))
        assert ended(service) == [1, 1, 1]
    assert ended(service) == [0, 2, 2]
