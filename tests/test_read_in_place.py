"""Hidden states in page-locked memory over the fake driver: brought from where they are, and held as long as that."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import ctypes
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.driver")

from fake_engine import ELSEWHERE, SPEC, Fetched, Locked, Opened, opened, opened_over
from moelet.graphs import staging
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.pool import Runnable
from moelet.layer.engine import Forward, LayerBatch
from moelet.layer.errors import EngineError
from random_layers import random_batch

ROW = SPEC.hidden_size * 2
ASK = "cuPointerGetAttributes"


@pytest.fixture
def asking(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """An engine that asks of hidden states as few as these are."""
    monkeypatch.setattr(staging, "ASKED_BYTES", ROW)
    return opened


def run(engine: Opened, batch: LayerBatch) -> tuple[list[Fetched], list[tuple[int, int]]]:
    """What a forward of ``batch`` brought over the bus, all of it right."""
    engine.driver.fetches.clear()
    engine.driver.copies.clear()
    engine.engine.begin(batch).result()
    assert engine.came(batch)
    return list(engine.driver.fetches), list(engine.driver.copies)


def test_they_are_fetched_from_where_they_are(asking: Opened) -> None:
    locked = Locked()
    [block] = [each.tobytes() for each in blocks(asking)[:1]]
    for offset in (0, 16, 3 * ROW):
        [fetched], copies = run(asking, locked.holding(random_batch(SPEC, 4, seed=offset), offset))
        assert (fetched.rest, fetched.rest_bytes) == (locked.address + offset + ELSEWHERE, 4 * ROW)
        assert not copies
    assert blocks(asking)[0].tobytes() == block, "nothing of them was copied"
    assert asking.calls(hidden_states=locked.holding(random_batch(SPEC, 4)).hidden_states) == [
        "cuCtxSetCurrent",
        ASK,
        ASK,
        "cuLaunchKernelEx",
        "cuGraphLaunch",
        "cuEventRecord",
        "cuCtxSetCurrent",
        "cuEventSynchronize",
    ]
    [fetched], _ = run(asking, random_batch(SPEC, 4, seed=9))
    assert fetched.rest == fetched.first + fetched.first_bytes, "the next is all in its block again"


def blocks(engine: Opened) -> list["np.ndarray"]:
    """Where each block of pinned memory has hidden states of four tokens that are routed by top-k."""
    own = engine.engine._served[0].staging
    return [each._buffer.array(np.uint8, (4 * ROW,), 1024) for each in own._inputs]


def unlike(locked: Locked) -> dict[str, Tensor]:
    """Hidden states of four tokens that cannot be fetched from where they are."""
    flat = torch.from_numpy(locked.bytes.view(np.int16)).view(torch.bfloat16)
    flat.copy_(torch.randn(len(flat)))
    half = Locked(4 * ROW)
    half.forget()
    driver.cuMemHostRegister(half.address, 2 * ROW, 0)
    return {
        "pageable": torch.randn(4, SPEC.hidden_size).bfloat16(),
        "misaligned": flat[1 : 1 + 4 * SPEC.hidden_size].view(4, -1),
        "every other row": flat[: 8 * SPEC.hidden_size].view(8, -1)[::2],
        "columns": flat[: 8 * SPEC.hidden_size].view(4, -1)[:, ::2],
        "transposed": flat[: 4 * SPEC.hidden_size].view(-1, 4).T,
        "half locked": half.holding(random_batch(SPEC, 4)).hidden_states,
    }


@pytest.mark.parametrize("name", ["pageable", "misaligned", "every other row", "columns", "transposed", "half locked"])
def test_others_are_copied(asking: Opened, name: str) -> None:
    hidden = unlike(Locked())[name]
    [fetched], _ = run(asking, replace(random_batch(SPEC, 4), hidden_states=hidden))
    assert fetched.rest == fetched.first + fetched.first_bytes


def test_few_are_not_asked_of(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, batch = Locked(), random_batch(SPEC, 4)
    for least, asked in ((4 * ROW + 1, 0), (4 * ROW, 2)):
        monkeypatch.setattr(staging, "ASKED_BYTES", least)
        assert opened.calls(hidden_states=locked.holding(batch).hidden_states).count(ASK) == asked


def test_rows_that_are_padded_are_not_asked_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ASKED_BYTES", 1)
    narrow = replace(SPEC, hidden_size=96)
    batch = random_batch(narrow, 4)
    with opened_over(monkeypatch, narrow) as engine:
        engine.engine.forward(Locked().holding(batch))
        [fetched] = engine.driver.fetches
        assert ASK not in engine.driver.calls
        assert fetched.rest == fetched.first + fetched.first_bytes
        stride = fetched.rest_bytes // 8
        sent = ctypes.string_at(engine.driver.input + fetched.first_bytes, fetched.rest_bytes)
    rows = torch.frombuffer(bytearray(sent), dtype=torch.bfloat16).view(4, stride)
    assert rows[:, :96].equal(batch.hidden_states)
    assert not rows[:, 96:].any()


def test_many_are_copied_to_the_device_from_where_they_are(asking: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = Locked()
    monkeypatch.setattr(staging, "FETCHED_BYTES", 1)
    fetches, [(_, head), hidden] = run(asking, locked.holding(random_batch(SPEC, 4), 32))
    assert not fetches
    assert head == 1024
    assert hidden == (locked.address + 32, 4 * ROW)


def test_beside_another_forward_they_are_too(asking: Opened) -> None:
    locked = Locked()
    ahead = asking.engine.begin(random_batch(SPEC, 3))
    fetches, copies = run(asking, locked.holding(random_batch(SPEC, 4)))
    assert not fetches
    assert copies[1] == (locked.address, 4 * ROW)
    ahead.result()
    ahead = asking.engine.begin(random_batch(SPEC, 3))
    _, copies = run(asking, random_batch(SPEC, 4))
    assert len(copies) == 1, "what has to be copied on the host crosses the bus as one"
    ahead.result()


def test_parts_of_more_tokens_than_run_at_once_are_fetched_each(asking: Opened) -> None:
    locked = Locked()
    batch = locked.holding(random_batch(SPEC, 20))
    asking.engine.forward(batch)
    assert [fetched.rest for fetched in asking.driver.fetches] == [
        locked.address + start * ROW + ELSEWHERE for start in (0, 16)
    ]


def test_what_stays_unfinalized_is_copied(asking: Opened) -> None:
    asking.engine.forward_unfinalized(Locked().holding(random_batch(SPEC, 4)))
    [fetched] = asking.driver.fetches
    assert fetched.rest == fetched.first + fetched.first_bytes


def begun(engine: Opened, seed: int = 0) -> "tuple[weakref.ref[object], Forward]":
    """A forward of page-locked memory that nobody else holds, and that memory."""
    locked = Locked()
    memory: weakref.ref[object] = weakref.ref(locked.storage)
    return memory, engine.engine.begin(locked.holding(random_batch(SPEC, 4, seed=seed)))


def is_held(memory: "weakref.ref[object]") -> bool:
    gc.collect()
    return memory() is not None


def fails(*_: object) -> tuple[object]:
    return (driver.CUresult.CUDA_ERROR_UNKNOWN,)


def test_memory_is_held_until_the_output_is_there(asking: Opened) -> None:
    memory, forward = begun(asking)
    assert is_held(memory)
    behind, second = begun(asking, 1)
    forward.result()
    assert not is_held(memory)
    assert is_held(behind)
    second.result()
    assert not is_held(behind)


def test_memory_that_was_waited_for_in_vain_is_held_for_good(asking: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it than there are places for forwards, so that each has another by then."""
    lost = []
    with monkeypatch.context() as patched:
        patched.setattr(driver, "cuEventSynchronize", fails)
        for number in range(5):
            memory, forward = begun(asking, number)
            lost.append(memory)
            with pytest.raises(DriverError):
                forward.result()
    del forward
    for number in range(5):
        begun(asking, number)[1].result()
        assert all(map(is_held, lost))


def test_memory_of_what_was_sent_and_no_more_is_held_for_good(asking: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph could not be launched, but the fetch was. So many times, and no more memory is lost that way."""
    lost = [fails_to_run(asking, monkeypatch, Locked()) for _ in range(staging.MOST_LOST + 3)]
    assert run(asking, random_batch(SPEC, 4))
    held = [is_held(memory) for memory in lost]
    assert held == [True] * staging.MOST_LOST + [False] * 3
    [fetched], _ = run(asking, Locked().holding(random_batch(SPEC, 4)))
    assert fetched.rest == fetched.first + fetched.first_bytes


def fails_to_run(engine: Opened, monkeypatch: pytest.MonkeyPatch, locked: Locked) -> "weakref.ref[object]":
    def refuses(*_: object) -> None:
        raise EngineError("no graph is launched")

    with monkeypatch.context() as patched:
        patched.setattr(Runnable, "run", refuses)
        with pytest.raises(EngineError):
            engine.engine.begin(locked.holding(random_batch(SPEC, 4)))
    return weakref.ref(locked.storage)
