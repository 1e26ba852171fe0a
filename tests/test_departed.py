"""Version numbers of adapters that leave and come back: never the same twice, in bounded memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moelet.layer.departed import DepartedNames


def test_a_name_counts_on_where_it_left() -> None:
    names = DepartedNames()
    assert names.come_back("a") == 1
    names.add("a", 3, evicted=False)
    names.add("ab", 7, evicted=True)
    assert list(names.evicted) == ["ab"]
    assert names.was_evicted("ab")
    assert not names.was_evicted("a")
    assert names.come_back("a") == 4
    assert names.come_back("ab") == 8
    assert list(names.evicted) == []
    assert not names.was_evicted("ab")


def test_forgotten_names_go_on_above_every_forgotten_number() -> None:
    names = DepartedNames(limit=2)
    names.add("old", 9, evicted=True)
    names.add("b", 1, evicted=False)
    names.add("c", 2, evicted=False)
    assert len(names) == 2
    assert not names.was_evicted("old")
    assert names.come_back("b") == 2
    assert names.come_back("old") == 10
    assert names.come_back("never seen") == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=40), st.integers(0, 3))
def test_no_number_is_given_twice(visits: list[tuple[str, int]], limit: int) -> None:
    names = DepartedNames(limit)
    seen: set[tuple[str, int]] = set()
    for name, replacements in visits:
        first = names.come_back(name)
        given_now = {(name, first + i) for i in range(replacements + 1)}
        assert not given_now & seen
        seen |= given_now
        names.add(name, first + replacements, evicted=False)
        assert len(names) <= limit
