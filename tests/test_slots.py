"""Adapter bookkeeping case by case: versions, drains, evictions, pins, slots, and miscounting callers."""

from pathlib import Path

import pytest

from moelet.layer.adapter import Adapter
from moelet.layer.adapter_version import AdapterVersion, check_name
from moelet.layer.errors import (
    AdapterBusyError,
    AdapterCapacityError,
    AdapterNotLoadedError,
    ConfigurationError,
    RequestError,
)
from moelet.layer.slots import AdapterTable

ADAPTER = Adapter(path=Path("a"), rank=4, lora_alpha=8.0, scaling=2.0, layers={})


def table_with(*names: str, max_loras: int = 2, max_cpu_loras: int = 8) -> AdapterTable:
    table = AdapterTable(max_loras, max_cpu_loras)
    for name in names:
        table.put(name, ADAPTER)
    return table


def seated(table: AdapterTable, *versions: AdapterVersion) -> list[AdapterVersion]:
    """``place`` them, and have those installed that must be."""
    missing = table.place(versions)
    for version in missing:
        table.installed(version)
    return missing


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
    seated(table, foo, foobar)
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
    assert seated(table, old) == [old]
    new = table.put("a", ADAPTER, replace=True)
    assert (old.version, new.version) == (1, 2)
    assert table.acquire("a") is new
    assert seated(table, new) == [new]
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
    seated(table, table.current("a"))
    with pytest.raises(AdapterCapacityError, match="in use"):
        table.put("b", ADAPTER)
    assert [v.name for v in table] == ["a"]


def test_a_name_is_evicted_though_a_version_before_is_in_use() -> None:
    table = table_with("a", "b", max_cpu_loras=2)
    held = table.acquire("a")
    table.put("a", ADAPTER, replace=True)
    table.acquire("b")
    table.put("c", ADAPTER)
    assert [version.name for version in table] == ["b", "c"]
    assert table.retired == (held,)
    table.release(held)
    assert table.retired == ()


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
    seated(table, pinned)
    table.unplace([pinned])
    slot = pinned.slot
    for other in others:
        assert seated(table, other) == [other]
        table.unplace([other])
    assert pinned.slot == slot
    with pytest.raises(AdapterCapacityError, match=r"2 adapters needs 2 more of the 2 adapter slots, and 1"):
        seated(table, *others[:2])
    table.acquire("p")
    table.put("p", ADAPTER, replace=True)
    assert seated(table, *others[:2]), "the pin went with the version that was replaced"
    assert table.slot_evictions == 4


def test_a_waiting_adapter_keeps_its_slot_before_an_idle_one() -> None:
    table = table_with("a", "b", "c")
    waiting = table.acquire("a")
    idle = table.current("b")
    seated(table, waiting, idle)
    table.unplace([waiting, idle])
    table.release(table.acquire("b"))
    assert waiting.last_used < idle.last_used
    assert seated(table, table.current("c"))
    assert idle.slot is None
    assert waiting.slot is not None


def test_a_slot_held_by_two_batches_is_let_go_by_the_second() -> None:
    table = table_with("a", "b", max_loras=1)
    a, b = table.current("a"), table.current("b")
    assert seated(table, a, a) == [a]
    assert seated(table, a) == []
    table.unplace([a])
    with pytest.raises(AdapterCapacityError):
        seated(table, b)
    table.unplace([a])
    assert seated(table, b) == [b]
    assert (table.installs, table.slot_evictions) == (2, 1)


def test_a_failed_install_gives_its_slot_back() -> None:
    table = table_with("a", "b", max_loras=1)
    a = table.current("a")
    seated(table, a)
    with pytest.raises(RuntimeError, match=r"slot 0 of 'a' is held 1 times"):
        table.vacate(a)
    table.unplace([a])
    table.vacate(a)
    assert table.take_freed() == [0]
    assert seated(table, a) == [a], "it is installed anew"


def test_a_slot_taken_again_is_not_reported_freed() -> None:
    table = table_with("a", "b", max_loras=1)
    seated(table, table.current("a"))
    table.unplace([table.current("a")])
    table.remove("a")
    assert table.free_slots() == [0]
    seated(table, table.current("b"))
    assert table.take_freed() == []


def test_miscounting_is_caught_and_changes_nothing() -> None:
    table = table_with("a", "b")
    a, b = table.current("a"), table.current("b")
    with pytest.raises(RuntimeError, match="released more often"):
        table.release(a)
    seated(table, a)
    with pytest.raises(RuntimeError, match="unplaced more often"):
        table.unplace([a, b])
    assert (a.in_flight, a.holds, b.holds) == (0, 1, 0)
    table.unplace([a])
    table.remove("a")
    with pytest.raises(RuntimeError, match="gone"):
        seated(table, b, a)
    assert (a.slot, b.slot, b.holds) == (None, None, 0)


def test_ten_thousand_adapters_leave_nothing_behind() -> None:
    table = AdapterTable(2, 3)
    for i in range(10_000):
        version = table.put(f"n{i}", ADAPTER)
        table.acquire(version.name)
        seated(table, version)
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
