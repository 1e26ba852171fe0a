"""Adapter bookkeeping against a plain model of dicts and lists, and the cases that went wrong elsewhere."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moelet.layer.adapter import Adapter
from moelet.layer.errors import (
    AdapterAlreadyLoadedError,
    AdapterBusyError,
    AdapterCapacityError,
    AdapterNotLoadedError,
    ConfigurationError,
    RequestError,
)
from moelet.layer.slots import AdapterTable, AdapterVersion, check_name

ADAPTER = Adapter(path=Path("a"), rank=4, lora_alpha=8.0, scaling=2.0, layers={})


def table_with(*names: str, max_loras: int = 2, max_cpu_loras: int = 8) -> AdapterTable:
    table = AdapterTable(max_loras, max_cpu_loras)
    for name in names:
        table.put(name, ADAPTER)
    return table


@pytest.mark.parametrize("name", ["a", "0", "foo.bar_baz-1", "A" * 128])
def test_names_that_are_taken(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "a b", "a/b", "a\n", "é", "٣", "A" * 129, "A" * 10**6])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"an adapter's name must match") as caught:
        check_name(name, "some_field")
    assert caught.value.param == "some_field"
    assert len(str(caught.value)) < 400
    table = table_with()
    with pytest.raises(RequestError):
        table.put(name, ADAPTER)
    assert len(table) == 0


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(0, 1), (1, 0)])
def test_limits_below_one_are_refused(max_loras: int, max_cpu_loras: int) -> None:
    with pytest.raises(ConfigurationError, match="must be at least 1, got 0"):
        AdapterTable(max_loras, max_cpu_loras)


def test_a_name_that_begins_with_another_is_another() -> None:
    table = table_with("foobar", "foo")
    assert [v.name for v in table] == ["foo", "foobar"]
    foo, foobar = table.acquire("foo"), table.acquire("foobar")
    table.place([foo, foobar])
    assert foo.slot != foobar.slot
    table.unplace([foo, foobar])
    table.release(foo)
    table.remove("foo")
    assert table.current("foobar") is foobar
    assert foobar.slot is not None
    with pytest.raises(AdapterNotLoadedError, match=r"'foo' is not loaded; loaded: foobar$"):
        table.acquire("foo")


def test_a_replaced_version_serves_its_requests_to_their_end() -> None:
    table = table_with("a", max_loras=3)
    old = table.acquire("a")
    assert table.place([old]) == [old]
    new = table.put("a", ADAPTER, replace=True)
    assert (old.version, new.version) == (1, 2)
    assert table.acquire("a") is new
    assert table.place([new]) == [new]
    assert table.retired == (old,)
    assert old.slot is not None
    table.release(old)
    assert old.slot is not None, "its batch is still in flight"
    assert table.take_freed() == []
    freed = old.slot
    table.unplace([old])
    assert old.slot is None
    assert table.retired == ()
    assert table.take_freed() == [freed]
    assert table.take_freed() == []
    assert table.slot_table().count(new) == 1


def test_versions_are_not_reused_after_unload_or_eviction() -> None:
    table = table_with("a", max_cpu_loras=1)
    table.remove("a")
    assert table.put("a", ADAPTER).version == 2
    table.put("b", ADAPTER)
    assert table.evicted == ("a",)
    assert table.put("a", ADAPTER).version == 3
    assert table.evicted == ("b",)
    assert table.host_evictions == 2


def test_errors_say_evicted_unloading_or_nothing() -> None:
    table = table_with("a", "b", "c", max_cpu_loras=2)
    with pytest.raises(AdapterNotLoadedError, match=r"'a' is not loaded: it was evicted .*; loaded: b, c$"):
        table.acquire("a")
    table.begin_drain("b")
    with pytest.raises(AdapterNotLoadedError, match=r"'b' is being unloaded; loaded: c$"):
        table.acquire("b")
    table.remove("b")
    with pytest.raises(AdapterNotLoadedError, match=r"'b' is not loaded; loaded: c$"):
        table.acquire("b")
    table.remove("c")
    with pytest.raises(AdapterNotLoadedError, match=r"loaded: none$"):
        table.current("c")


def test_unloading_waits_says_how_many_hold_it_and_can_be_called_off() -> None:
    table = table_with("a")
    held = [table.acquire("a"), table.acquire("a")]
    table.begin_drain("a")
    with pytest.raises(AdapterBusyError, match=r"2 request\(s\)") as caught:
        table.remove("a")
    assert caught.value.in_flight == 2
    with pytest.raises(AdapterBusyError, match="being unloaded already"):
        table.begin_drain("a")
    with pytest.raises(AdapterBusyError, match="cannot be replaced"):
        table.put("a", ADAPTER, replace=True)
    table.cancel_drain("a")
    assert table.acquire("a") is held[0]
    assert held[0].in_flight == 3


def test_a_full_host_whose_adapters_are_in_use_refuses_and_recovers() -> None:
    table = table_with("a", max_loras=1, max_cpu_loras=1)
    held = table.acquire("a")
    with pytest.raises(AdapterCapacityError, match=r"max_cpu_loras"):
        table.put("b", ADAPTER)
    assert [v.name for v in table] == ["a"]
    table.release(held)
    table.put("b", ADAPTER)
    assert [v.name for v in table] == ["b"]
    assert held.retired


def test_an_adapter_of_a_batch_in_flight_is_not_evicted_from_the_host() -> None:
    table = table_with("a", max_cpu_loras=1)
    table.place([table.current("a")])
    with pytest.raises(AdapterCapacityError, match="in use"):
        table.put("b", ADAPTER)
    assert [v.name for v in table] == ["a"]


def test_the_host_evicts_what_was_used_longest_ago() -> None:
    table = table_with("a", "b", "c", max_cpu_loras=3)
    table.release(table.acquire("a"))
    table.put("d", ADAPTER)
    assert table.evicted == ("b",)


def test_pins_leave_a_slot_for_others() -> None:
    table = AdapterTable(3, 8)
    table.put("a", ADAPTER, pinned=True)
    table.put("b", ADAPTER, pinned=True)
    with pytest.raises(AdapterCapacityError, match="at most 2 may be, and 2 are"):
        table.put("c", ADAPTER, pinned=True)
    assert len(table) == 2
    assert table.put("b", ADAPTER, pinned=True, replace=True).version == 2
    with pytest.raises(AdapterCapacityError, match="at most 0 may be"):
        AdapterTable(1, 8).put("a", ADAPTER, pinned=True)


def test_a_pinned_adapter_stays_in_its_slot_until_replaced() -> None:
    table = AdapterTable(2, 8)
    pinned = table.put("p", ADAPTER, pinned=True)
    others = [table.put(name, ADAPTER) for name in "abc"]
    table.place([pinned])
    table.unplace([pinned])
    slot = pinned.slot
    for other in others:
        assert table.place([other]) == [other]
        table.unplace([other])
    assert pinned.slot == slot
    with pytest.raises(AdapterCapacityError, match=r"2 adapters needs 2 more of the 2 adapter slots, and 1"):
        table.place(others[:2])
    table.acquire("p")
    table.put("p", ADAPTER, replace=True)
    assert table.place(others[:2]), "the pin went with the version that was replaced"
    assert table.slot_evictions == 4


def test_a_waiting_adapter_keeps_its_slot_before_an_idle_one() -> None:
    table = table_with("a", "b", "c")
    waiting = table.acquire("a")
    idle = table.current("b")
    table.place([waiting, idle])
    table.unplace([waiting, idle])
    table.release(table.acquire("b"))
    assert waiting.last_used < idle.last_used
    assert table.place([table.current("c")])
    assert idle.slot is None
    assert waiting.slot is not None


def test_a_slot_held_by_two_batches_is_let_go_by_the_second() -> None:
    table = table_with("a", "b", max_loras=1)
    a, b = table.current("a"), table.current("b")
    assert table.place([a, a]) == [a]
    assert table.place([a]) == []
    table.unplace([a])
    with pytest.raises(AdapterCapacityError):
        table.place([b])
    table.unplace([a])
    assert table.place([b]) == [b]
    assert (table.installs, table.slot_evictions) == (2, 1)


def test_a_failed_install_gives_its_slot_back() -> None:
    table = table_with("a", "b", max_loras=1)
    a = table.current("a")
    table.place([a])
    with pytest.raises(RuntimeError, match="1 batches hold slot 0"):
        table.vacate(a)
    table.unplace([a])
    table.vacate(a)
    assert table.take_freed() == [0]
    assert table.place([a]) == [a], "it is installed anew"


def test_a_slot_taken_again_is_not_reported_freed() -> None:
    table = table_with("a", "b", max_loras=1)
    table.place([table.current("a")])
    table.unplace([table.current("a")])
    table.remove("a")
    assert table.free_slots() == [0]
    table.place([table.current("b")])
    assert table.take_freed() == []


def test_miscounting_is_caught_and_changes_nothing() -> None:
    table = table_with("a", "b")
    a, b = table.current("a"), table.current("b")
    with pytest.raises(RuntimeError, match="released more often"):
        table.release(a)
    table.place([a])
    with pytest.raises(RuntimeError, match="unplaced more often"):
        table.unplace([a, b])
    assert (a.in_flight, a.holds, b.holds) == (0, 1, 0)
    table.unplace([a])
    table.remove("a")
    with pytest.raises(RuntimeError, match="gone"):
        table.place([b, a])
    assert (a.slot, b.slot, b.holds) == (None, None, 0)


def test_ten_thousand_adapters_leave_nothing_behind() -> None:
    table = AdapterTable(2, 3)
    for i in range(10_000):
        version = table.put(f"n{i}", ADAPTER)
        table.acquire(version.name)
        table.place([version])
        if i % 3 == 0:
            table.put(version.name, ADAPTER, replace=True)
        table.unplace([version])
        table.release(version)
        if i % 5 == 0:
            table.remove(version.name)
    assert version.in_use is False
    sizes = {name: len(value) for name, value in vars(table).items() if hasattr(value, "__len__")}
    assert sizes["_current"] <= 3
    assert sizes["_slots"] == 2
    assert sizes["_retired"] == 0
    assert sizes["_departed"] <= 4096
    assert sizes["_freed"] <= 2
    assert set(sizes) == {"_current", "_retired", "_departed", "_slots", "_freed"}


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
        self.counts = {"installs": 0, "slot_evictions": 0, "host_evictions": 0}

    def find(self, name: str) -> Record | None:
        return next((r for r in self.order if r["name"] == name and r["current"]), None)

    def touch(self, record: Record) -> None:
        self.order.sort(key=lambda r: r is record)

    def users(self, record: Record) -> int:
        return sum(r is record for r in self.requests)

    def holds(self, record: Record) -> int:
        return sum(r is record for batch in self.batches for r in batch)

    def bury_the_dead(self) -> None:
        for record in [r for r in self.order if not (r["current"] or self.users(r) or self.holds(r))]:
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
        evictable = [r for r in current if not (r["pinned"] or r["draining"] or self.users(r) or self.holds(r))]
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
    def vacate(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.order))
        if self.holds(record):
            with pytest.raises(RuntimeError):
                self.table.vacate(record["version"])
            return
        self.table.vacate(record["version"])
        self.free(record)

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


Bookkeeping.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBookkeeping = Bookkeeping.TestCase
