"""The service against a plain model, over any order of loads, replaces, unloads, forwards and cancellations."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moelet.layer.errors import (
    AdapterAlreadyLoadedError,
    AdapterBusyError,
    AdapterCapacityError,
    AdapterNotLoadedError,
    EngineError,
)
from moelet.service.call import Answer
from moelet.service.limits import Limits
from plain_engine import POISON, PlainEngine, PlainService, output_of, tokens

NAMES = st.sampled_from("abcdefg")
MAX_CPU = 5


class Asked:
    """A forward that was asked for, and what it should come to."""

    def __init__(self, task: "asyncio.Task[Answer]", names: list[str | None], expected: torch.Tensor | None) -> None:
        self.task = task
        self.names = {name for name in names if name is not None}
        self.expected = expected


class Swapping(RuleBasedStateMachine):
    """``codes`` is the model: what a forward by name should see now. What was asked for earlier must get the code of
    that moment, whatever happens before its turn comes; the engine stands still between ``compute`` steps, and so do
    installs after ``hold_installs``."""

    @initialize(depth=st.integers(1, 3), max_loras=st.integers(1, 4))
    def start(self, depth: int, max_loras: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.engine = PlainEngine(depth=depth, max_loras=max_loras, batch_tokens=6)
        self.plain = PlainService(self.engine, self.root, max_cpu_loras=MAX_CPU, limits=Limits(request_timeout_s=600))
        self.loop.run_until_complete(self.plain.service.start())
        self.codes: dict[str, float] = {}
        self.pinned: set[str] = set()
        self.asked: list[Asked] = []
        self.max_pins = max_loras - 1
        self.engine._gate.clear()

    def teardown(self) -> None:
        if not hasattr(self, "plain"):
            return
        self.compute()
        assert self.asked == []
        self.engine._gate.set()  # a batch of cancelled forwards may only now get to it
        self.plain.check_idle()
        self.loop.run_until_complete(self.plain.service.stop())
        self.loop.close()
        shutil.rmtree(self.root)

    def holding(self, name: str) -> int:
        return sum(name in asked.names for asked in self.asked)

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    @rule(name=NAMES, replace=st.booleans(), pinned=st.sampled_from([None, False, True]))
    def load(self, name: str, replace: bool, pinned: bool | None) -> None:
        wanted = name in self.pinned if pinned is None else pinned
        busy = {known: self.busy(known) for known in self.codes}
        try:
            code = self.run(self.plain.load(name, replace=replace, pinned=pinned))
        except AdapterAlreadyLoadedError:
            assert name in self.codes
            assert not replace
            return
        except AdapterCapacityError:
            too_many_pins = wanted and len(self.pinned - {name}) >= self.max_pins
            no_place = name not in self.codes and len(self.codes) == MAX_CPU
            assert too_many_pins or (no_place and all(n in self.pinned or self.busy(n) for n in self.codes))
            return
        assert replace or name not in self.codes
        self.codes[name] = code
        (self.pinned.add if wanted else self.pinned.discard)(name)
        evicted = set(busy) - {version.name for version in self.plain.service.adapters.table}
        assert len(evicted) == (name not in busy and len(busy) == MAX_CPU)
        for gone in evicted:
            assert gone not in self.pinned
            assert not (busy[gone] and self.holding(gone)), "requests that hold a replaced version keep no other"
            del self.codes[gone]

    def busy(self, name: str) -> bool:
        """Whether a request, or a batch of the engine, has the current version of ``name``."""
        return self.plain.service.adapters.table.current(name).in_use

    @rule(name=NAMES)
    def load_what_is_refused(self, name: str) -> None:
        self.plain.failing_read = AdapterCapacityError("no memory")
        with pytest.raises((AdapterCapacityError, AdapterAlreadyLoadedError)):
            self.run(self.plain.load(name))
        with pytest.raises(AdapterCapacityError):
            self.run(self.plain.load(name, replace=True))
        self.plain.failing_read = None

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        unloading = self.plain.service.adapters.unload(name, 0.001)
        if name not in self.codes:
            with pytest.raises(AdapterNotLoadedError):
                self.run(unloading)
        elif holding := self.holding(name):
            with pytest.raises(AdapterBusyError) as busy:
                self.run(unloading)
            assert busy.value.in_flight == holding
        else:
            self.run(unloading)
            del self.codes[name]
            self.pinned.discard(name)

    @rule(
        names=st.lists(st.one_of(st.none(), NAMES), min_size=1, max_size=14),
        layer=st.sampled_from([1, 3]),
        poisoned=st.sampled_from([False] * 7 + [True]),
    )
    def forward(self, names: list[str | None], layer: int, poisoned: bool) -> None:
        hidden = tokens(*range(len(names)))
        if poisoned:
            hidden[-1, 0] = POISON
        forward = self.plain.forward(hidden, adapters=names, layer=layer)
        if any(name is not None and name not in self.codes for name in names):
            with pytest.raises(AdapterNotLoadedError):
                self.run(forward)
            return
        expected = output_of(layer, hidden, [0.0 if name is None else self.codes[name] for name in names])
        self.asked.append(Asked(self.loop.create_task(forward), names, None if poisoned else expected))
        self.run(asyncio.sleep(0))

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.asked:
            asked = self.asked.pop(which % len(self.asked))
            asked.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                self.run(asked.task)

    @rule()
    def hold_installs(self) -> None:
        """From here until the next ``compute`` no adapter gets into its slot."""
        self.engine._install_gate.clear()

    @rule()
    def wait(self) -> None:
        """Batches are begun, as many as the engine takes, and none ends."""
        self.run(asyncio.sleep(0.002))

    @rule()
    def compute(self) -> None:
        """All that was asked for is answered, by what was current when it was asked for."""
        self.engine._gate.set()
        self.engine._install_gate.set()
        self.run(self.all_answered())
        self.engine._gate.clear()
        for asked in self.asked:
            error = asked.task.exception()
            if asked.expected is None:
                assert isinstance(error, EngineError)
            else:
                assert error is None
                assert torch.equal(asked.task.result().hidden_states, asked.expected)
        self.asked = []

    async def all_answered(self) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*(asked.task for asked in self.asked), return_exceptions=True)
            await self.plain.settled()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "plain"):
            return
        assert self.engine.wrongs == []
        table = self.plain.service.adapters.table
        assert {version.name: version.adapter.lora_alpha for version in table} == self.codes
        assert {version.name for version in table if version.pinned} == self.pinned
        assert self.plain.service.lifecycle.in_flight == len(self.asked)
        counts = self.plain.service.adapters.in_flight_by_name()
        assert {name: count for name, count in counts.items() if count} == {
            name: held for name in "abcdefg" if (held := self.holding(name))
        }


Swapping.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSwapping = Swapping.TestCase
