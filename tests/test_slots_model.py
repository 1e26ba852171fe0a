"""Adapter bookkeeping against a plain model of dicts and lists, over any order of calls."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moelet.layer.adapter import Adapter
from moelet.layer.adapter_version import AdapterVersion
from moelet.layer.errors import (
    AdapterAlreadyLoadedError,
    AdapterBusyError,
    AdapterCapacityError,
    AdapterNotLoadedError,
)
from moelet.layer.slots import AdapterTable

ADAPTER = Adapter(path=Path("a"), rank=4, lora_alpha=8.0, scaling=2.0, layers={})
NAMES = st.sampled_from(["foo", "foobar", "a", "b", "c"])
Record = dict[str, Any]


class Bookkeeping(RuleBasedStateMachine):
    """``AdapterTable`` beside a model whose records are dicts, least recently used first in ``order``."""

    @initialize(max_loras=st.integers(1, 3), max_cpu_loras=st.integers(1, 4))
    def start(self, max_loras: int, max_cpu_loras: int) -> None:
        self.table = AdapterTable(max_loras, max_cpu_loras)
        self.max_loras, self.max_cpu = max_loras, max_cpu_loras
        self.order: list[Record] = []
        self.slots: list[Record | None] = [None] * max_loras
        self.numbers: dict[str, int] = {}
        self.requests: list[Record] = []
        self.batches: list[list[Record]] = []
        self.evicted: list[str] = []
        self.freed: set[int] = set()
        self.installing: list[Record] = []
        self.counts = {"installs": 0, "slot_evictions": 0, "host_evictions": 0}

    def find(self, name: str) -> Record | None:
        return next((r for r in self.order if r["name"] == name and r["current"]), None)

    def touch(self, record: Record) -> None:
        self.order.sort(key=lambda r: r is record)

    def users(self, record: Record) -> int:
        return sum(r is record for r in self.requests)

    def holds(self, record: Record) -> int:
        return sum(r is record for batch in self.batches for r in batch)

    def in_use(self, record: Record) -> bool:
        return bool(self.users(record) or self.holds(record) or any(record is r for r in self.installing))

    def bury_the_dead(self) -> None:
        for record in [r for r in self.order if not (r["current"] or self.in_use(r))]:
            self.order.remove(record)
            self.free(record)

    def free(self, record: Record) -> None:
        for slot, there in enumerate(self.slots):
            if there is record:
                self.slots[slot] = None
                self.freed.add(slot)

    @rule(name=NAMES, pinned=st.booleans(), replace=st.booleans())
    def put(self, name: str, pinned: bool, replace: bool) -> None:
        old = self.find(name)
        current = [r for r in self.order if r["current"]]
        evictable = [r for r in current if not (r["pinned"] or r["draining"] or self.in_use(r))]
        error: type[Exception] | None = None
        if old and not replace:
            error = AdapterAlreadyLoadedError
        elif old and old["draining"]:
            error = AdapterBusyError
        elif (pinned and sum(r["pinned"] for r in current if r is not old) >= self.max_loras - 1) or (
            not old and len(current) == self.max_cpu and not evictable
        ):
            error = AdapterCapacityError
        if error:
            with pytest.raises(error):
                self.table.put(name, ADAPTER, pinned=pinned, replace=replace)
            return
        version = self.table.put(name, ADAPTER, pinned=pinned, replace=replace)
        if old:
            old["current"] = False
        elif len(current) == self.max_cpu:
            evictable[0]["current"] = False
            self.evicted.append(evictable[0]["name"])
            self.counts["host_evictions"] += 1
        self.evicted = [n for n in self.evicted if n != name]
        self.numbers[name] = self.numbers.get(name, 0) + 1
        record = {"name": name, "number": self.numbers[name], "pinned": pinned, "draining": False}
        self.order.append({**record, "current": True, "version": version})
        self.bury_the_dead()

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        record = self.find(name)
        if record is None or record["draining"]:
            with pytest.raises(AdapterNotLoadedError) as caught:
                self.table.acquire(name)
            assert ("being unloaded" in str(caught.value)) == (record is not None)
            assert ("evicted" in str(caught.value)) == (name in self.evicted)
            return
        assert self.table.acquire(name) is record["version"]
        self.requests.append(record)
        self.touch(record)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        record = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.table.release(record["version"])
        self.bury_the_dead()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        which = data.draw(st.lists(st.integers(0, len(self.order) - 1), max_size=4))
        batch = [self.order[i] for i in dict.fromkeys(which)]
        versions = [self.order[i]["version"] for i in which]
        slots, install, taken = list(self.slots), [], 0
        for record in batch:
            if any(there is record for there in slots):
                continue
            seats = [slot for slot, there in enumerate(slots) if there is None]
            idle = [r for r in self.order if not self.holds(r) and not any(r is b for b in batch)]
            idle = [r for r in idle if not any(r is there for there in self.installing)]
            idle = [r for r in idle if not (r["pinned"] and r["current"])]
            idle = [r for r in idle if not self.users(r)] + [r for r in idle if self.users(r)]
            seats += [slot for r in idle for slot, there in enumerate(slots) if there is r]
            if not seats:
                with pytest.raises(AdapterCapacityError):
                    self.table.place(versions)
                return
            taken += slots[seats[0]] is not None
            slots[seats[0]] = record
            install.append(record["version"])
        assert self.table.place(versions) == install
        self.freed -= {slot for slot, there in enumerate(slots) if there is not None}
        self.slots = slots
        self.counts["installs"] += len(install)
        self.counts["slot_evictions"] += taken
        self.batches.append(batch)
        self.installing += [r for r in batch if r["version"] in install]
        for record in batch:
            self.touch(record)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def unplace(self, data: st.DataObject) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        self.table.unplace([record["version"] for record in batch])
        self.bury_the_dead()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.order))
        if any(there is record for there in self.slots):
            self.table.hold([record["version"]])
            self.batches.append([record])
            self.touch(record)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def installed(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.installing or self.order))
        if not self.installing:
            with pytest.raises(RuntimeError, match="not being installed"):
                self.table.installed(record["version"])
            return
        self.table.installed(record["version"])
        self.installing = [r for r in self.installing if r is not record]
        self.bury_the_dead()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def vacate(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.order))
        if self.holds(record):
            with pytest.raises(RuntimeError):
                self.table.vacate(record["version"])
            return
        self.table.vacate(record["version"])
        self.installing = [r for r in self.installing if r is not record]
        self.free(record)
        self.bury_the_dead()

    @rule(name=NAMES)
    def begin_drain(self, name: str) -> None:
        record = self.find(name)
        if record is None or record["draining"]:
            with pytest.raises(AdapterBusyError if record else AdapterNotLoadedError):
                self.table.begin_drain(name)
            return
        assert self.table.begin_drain(name) is record["version"]
        record["draining"] = True

    @rule(name=NAMES)
    def cancel_drain(self, name: str) -> None:
        record = self.find(name)
        if record is None:
            with pytest.raises(AdapterNotLoadedError):
                self.table.cancel_drain(name)
            return
        self.table.cancel_drain(name)
        record["draining"] = False

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        record = self.find(name)
        if record is None or self.users(record):
            with pytest.raises(AdapterBusyError if record else AdapterNotLoadedError):
                self.table.remove(name)
            return
        assert self.table.remove(name) is record["version"]
        record["current"] = record["draining"] = False
        self.bury_the_dead()

    @rule()
    def take_freed(self) -> None:
        assert self.table.take_freed() == sorted(self.freed)
        self.freed.clear()

    @invariant()
    def table_equals_model(self) -> None:
        current = sorted((r for r in self.order if r["current"]), key=lambda r: r["name"])
        assert list(self.table) == [r["version"] for r in current]
        assert len(self.table) == len(current) <= self.max_cpu
        assert set(self.table.retired) == {r["version"] for r in self.order if not r["current"]}
        assert self.table.slot_table() == [r and r["version"] for r in self.slots]
        assert self.table.free_slots() == [slot for slot, there in enumerate(self.slots) if there is None]
        assert self.table.evicted == tuple(self.evicted)
        assert {name: getattr(self.table, name) for name in self.counts} == self.counts
        for record in self.order:
            version: AdapterVersion = record["version"]
            assert (version.name, version.version) == (record["name"], record["number"])
            assert (version.in_flight, version.holds) == (self.users(record), self.holds(record))
            assert (version.pinned, version.draining) == (record["pinned"], record["draining"])
            assert version.retired == (not record["current"])
            assert version.slot == next((i for i, there in enumerate(self.slots) if there is record), None)
            assert not (version.holds and version.slot is None)
            assert version.installing == any(record is r for r in self.installing)
            assert version.ready == (version.slot is not None and not version.installing)


Bookkeeping.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBookkeeping = Bookkeeping.TestCase
