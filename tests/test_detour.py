"""The detour beside the arena: every copy waits for the one that it takes from, and data comes through whole."""

import ctypes
from collections.abc import Iterator

import pytest

from fake_driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")

from moelet.graphs.detour import Detour, Run
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer
from moelet.graphs.streams import Streams


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver().install(monkeypatch)
    yield fake
    assert fake.allocations == {}
    assert fake.events == {}


def text(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def test_copies_wait_for_each_other_on_their_own_streams(fake: FakeDriver) -> None:
    streams = Streams()
    detour = Detour(2, 64, 32, streams)
    pinned, arena, back = PinnedBuffer(64), DeviceBuffer(64), PinnedBuffer(32)
    assert detour.holds(64, 32)
    assert not detour.holds(65, 1)
    assert not detour.holds(1, 33)
    for place, word in enumerate((b"first", b"other")):
        ctypes.memmove(pinned.pointer, word, len(word))
        fake.calls.clear()
        detour.bring(place, arena.pointer, [Run(pinned.pointer, 0, len(word))], len(word))
        assert fake.calls == ["cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync"]
        assert text(arena.pointer, len(word)) == word
        fake.calls.clear()
        last = detour.take(place, back.pointer, arena.pointer, len(word))
        assert fake.calls == ["cuMemcpyDtoDAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync"]
        assert last is streams.outbound
        assert text(back.pointer, len(word)) == word
    for owned in (detour, pinned, arena, back, streams):
        owned.close()
