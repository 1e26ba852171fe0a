"""The GPU engine's adapter slots over the fake driver: filled from any thread, through the copy stream alone."""

import threading
from collections.abc import Callable

import pytest
import torch

from fake_driver import FakeDriver, ok
from moelet.graphs.adapters import SlotBank
from moelet.graphs.buffers import LORA_ENTRY
from moelet.graphs.engine import GraphEngine
from moelet.graphs.options import GraphOptions
from moelet.layer.errors import AdapterRefusedError, EngineError
from moelet.layer.spec import LayerSpec
from random_layers import model_of, random_adapter, random_weights

# ruff: noqa: ARG002 (the signatures are the driver's)

SPEC = LayerSpec(index=0, hidden_size=128, intermediate_size=64, num_experts=4, top_k=2)
RANK = 16


class NotingDriver(FakeDriver):
    """Notes on which threads the context was made current, and which streams were copied on and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.used: set[int] = set()

    def cuCtxSetCurrent(self, context):
        self.entered.append(threading.current_thread().name)
        return ok()

    def cuMemcpy3DBatchAsync(self, count, operations, flags, stream):
        self.used.add(int(stream))
        return super().cuMemcpy3DBatchAsync(count, operations, flags, stream)

    def cuStreamSynchronize(self, stream):
        self.used.add(int(stream))
        return ok()


def on_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="slots")
    thread.start()
    thread.join(30)


def test_slots_are_filled_from_any_thread_over_the_copy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread makes the device its own each time; no other stream is used or waited for, on which forwards run."""
    fake = NotingDriver()
    fake.install(monkeypatch)
    engine = GraphEngine(model_of(SPEC), GraphOptions(max_loras=2, max_lora_rank=RANK))
    engine.add_layer(SPEC.index, random_weights(SPEC))
    slots, copy = engine._slots[SPEC.index], engine._streams.copy
    engine._bank = SlotBank(engine._slots, RANK, copy)
    fake.entered.clear()
    fake.used.clear()

    def ranks() -> list[bool]:
        table = slots._entries.read(torch.uint8, (2, SPEC.num_experts * LORA_ENTRY.itemsize)).numpy()
        return [bool(entries.view(LORA_ENTRY)["rank"].any()) for entries in table]

    on_a_thread(lambda: engine.install_adapter(1, random_adapter(SPEC, rank=8)))
    assert ranks() == [False, True]
    on_a_thread(lambda: engine.remove_adapter(1))
    assert ranks() == [False, False]
    assert fake.entered == ["slots"] * 2
    assert fake.used == {int(copy)}
    with pytest.raises(AdapterRefusedError, match="a rank of at most 16"):
        engine.install_adapter(0, random_adapter(SPEC, rank=RANK + 8))
    assert ranks() == [False, False]


@pytest.mark.parametrize("max_loras", [2, 0])
def test_a_slot_that_is_not_there_is_an_error_of_the_engine_s(monkeypatch: pytest.MonkeyPatch, max_loras: int) -> None:
    """Before anything is asked of the driver; also where there is no slot at all."""
    fake = FakeDriver()
    fake.install(monkeypatch)
    engine = GraphEngine(model_of(SPEC), GraphOptions(max_loras=max_loras, max_lora_rank=RANK))
    engine.add_layer(SPEC.index, random_weights(SPEC))
    if max_loras:
        engine._bank = SlotBank(engine._slots, RANK, engine._streams.copy)
    there = "the slots are 0 to 1" if max_loras else "there are none"
    fake.calls.clear()
    for slot in (-1, max_loras):
        for rank in (8, RANK + 8):  # the slot is looked at first
            with pytest.raises(EngineError, match=f"^there is no adapter slot {slot}: {there}$"):
                engine.install_adapter(slot, random_adapter(SPEC, rank=rank))
        with pytest.raises(EngineError, match=f"^there is no adapter slot {slot}: {there}$"):
            engine.remove_adapter(slot)
    assert fake.calls == []
