"""Arenas place every buffer apart from every other, share memory between shapes, and never move once frozen."""

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_driver import FakeDriver
from moelet.graphs.arena import Arena, ArenaPlan, ArenaRow, BufferSpec, shared_memory
from moelet.graphs.memory import DeviceBuffer, PinnedBuffer, copy_to_device, copy_to_host
from moelet.graphs.streams import Stream
from moelet.layer.errors import EngineError

pytest.importorskip("cuda.bindings.driver")

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def plan_of(tokens: int) -> ArenaPlan:
    return ArenaPlan(
        f"T={tokens}",
        [
            BufferSpec("map", (tokens, 3), INT32),
            BufferSpec("act", (tokens * 3, 88), BF16, alignment=1024),
            BufferSpec("out", (tokens, 40), BF16),
        ],
    )


def test_a_plan_lists_offsets_bytes_and_shapes() -> None:
    plan = plan_of(5)
    assert plan.describe() == [
        ArenaRow("map", 0, 60, "int32", (5, 3)),
        ArenaRow("act", 1024, 2640, "bfloat16", (15, 88)),
        ArenaRow("out", 3840, 400, "bfloat16", (5, 40)),
    ]
    assert plan.total_bytes == 4352


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3).map(tuple),
            st.sampled_from([BF16, FP32, INT32, torch.uint8]),
            st.sampled_from([256, 512, 1024]),
        ),
        max_size=12,
    )
)
def test_buffers_are_aligned_and_never_overlap(wanted: list) -> None:
    plan = ArenaPlan("any", [BufferSpec(f"b{i}", *spec) for i, spec in enumerate(wanted)])
    end = 0
    for row, (shape, dtype, alignment) in zip(plan.describe(), wanted, strict=True):
        assert row.offset % alignment == 0
        assert row.offset >= end
        assert row.num_bytes == math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        assert row.offset - end < alignment
        end = row.offset + row.num_bytes
    assert plan.total_bytes >= max(end, 1)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([BufferSpec("x", (1,), BF16), BufferSpec("x", (2,), BF16)], "declared twice"),
        ([("x", (1,), BF16, 300)], "power of two"),
        ([("x", (1,), BF16, 128)], "power of two"),
        ([("x", (-1,), BF16)], "negative"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(buffers: list, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ArenaPlan("bad", [spec if isinstance(spec, BufferSpec) else BufferSpec(*spec) for spec in buffers])


def test_an_arena_keeps_alignments_that_the_driver_does_not_promise(fake: FakeDriver) -> None:
    arena = Arena(plan_of(7))
    [(start, storage)] = fake.allocations.items()
    assert start % 1024 == 256
    assert arena.pointer("act") % 1024 == 0
    assert arena.pointer("map") % 256 == arena.pointer("out") % 256 == 0
    last = arena.pointer("out") + 7 * 40 * 2
    assert start <= arena.pointer("map") < last <= ctypes.addressof(storage) + len(storage)
    arena.close()
    assert not fake.allocations


@pytest.mark.usefixtures("fake")
def test_buffers_hold_what_is_written_and_poison_the_rest() -> None:
    arena, stream = Arena(plan_of(2)), Stream("main")
    arena.poison(stream)
    values = torch.arange(80, dtype=BF16).view(2, 40)
    arena.write("out", values)
    assert torch.equal(arena.read("out"), values)
    assert arena.read("act").isnan().all()
    assert (arena.read("map") == -1).all()
    with pytest.raises(EngineError, match=r"buffer out is torch.bfloat16 of shape \[2, 40\], got torch.float32"):
        arena.write("out", values.float())
    with pytest.raises(EngineError, match="arena T=2 has no buffer nothing; it has map, act, out"):
        arena.pointer("nothing")


def test_shapes_share_one_allocation_as_large_as_the_largest(fake: FakeDriver) -> None:
    plans = [plan_of(tokens) for tokens in (1, 64, 8)]
    memory = shared_memory(plans)
    arenas = [Arena(plan, memory) for plan in plans]
    assert len(fake.allocations) == 1
    assert len({arena.pointer("map") for arena in arenas}) == 1
    end = memory.pointer + memory.num_bytes
    assert max(arena.pointer("out") + arena.plan.buffers["out"].num_bytes for arena in arenas) <= end
    for arena in arenas:
        arena.close()
    assert len(fake.allocations) == 1
    with pytest.raises(EngineError, match="arena T=65 needs"):
        Arena(plan_of(65), memory)
    memory.close()
    with pytest.raises(EngineError, match="after it was freed"):
        arenas[0].read("map")


def test_pinned_views_are_the_memory_itself(fake: FakeDriver) -> None:
    buffer = PinnedBuffer(64)
    numbers = buffer.tensor(INT32, (2, 3), offset=8)
    numbers.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert buffer.array(np.int32, (6,), offset=8).tolist() == [1, 2, 3, 4, 5, 6]
    buffer.array("u1", (64,))[8:12] = 0
    assert numbers[0, 0] == 0
    assert numbers.data_ptr() == buffer.pointer + 8
    assert buffer.tensor(BF16, (0, 7)).shape == (0, 7)
    for view in (buffer.tensor, buffer.array):
        with pytest.raises(EngineError, match="64"):
            view(torch.int64 if view == buffer.tensor else np.int64, (8,), offset=8)
    buffer.close()
    buffer.close()
    assert not fake.allocations
    with pytest.raises(EngineError, match="used after it was freed"):
        buffer.tensor(INT32, (1,))


@pytest.mark.usefixtures("fake")
def test_copies_go_where_they_say() -> None:
    stream = Stream("copy")
    pinned, first, second = PinnedBuffer(32), DeviceBuffer(32), DeviceBuffer(32)
    values = pinned.tensor(torch.uint8, (32,))
    values.copy_(torch.arange(32))
    copy_to_device(first.pointer, pinned.pointer, 32, stream)
    second.fill(9, stream)
    copy_to_device(second.pointer, pinned.pointer + 28, 4, stream)
    copy_to_host(pinned.pointer, second.pointer, 8, stream)
    copy_to_host(pinned.pointer + 16, first.pointer + 4, 2, stream)
    assert values[:19].tolist() == [28, 29, 30, 31, 9, 9, 9, 9, *range(8, 16), 4, 5, 18]


@pytest.mark.usefixtures("fake")
def test_device_buffers_refuse_what_leaves_them() -> None:
    buffer = DeviceBuffer(16)
    buffer.write(torch.tensor([[1, 2], [3, 4]], dtype=INT32).t())
    assert buffer.read(INT32, (4,)).tolist() == [1, 3, 2, 4]
    with pytest.raises(EngineError, match="needs 20 bytes, but the buffer has 16"):
        buffer.write(torch.zeros(4, dtype=INT32), offset=4)
    with pytest.raises(EngineError, match="at least 1 byte"):
        DeviceBuffer(0)


def test_a_write_has_landed_when_it_returns(fake: FakeDriver) -> None:
    buffer = DeviceBuffer(16)
    fake.calls.clear()
    buffer.write(torch.zeros(4))
    assert fake.calls == ["cuMemcpyHtoD", "cuStreamSynchronize"]
