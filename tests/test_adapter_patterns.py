"""Rank and alpha patterns choose what PEFT's own function chooses."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from moelet.layer import adapter_patterns
from moelet.layer.adapter_patterns import Patterns
from moelet.layer.errors import AdapterRefusedError

NAMES = [
    *(
        f"model.layers.{layer}.mlp.experts.{e}.{name}_proj"
        for layer in (1, 11)
        for e in (1, 11)
        for name in ("up", "down")
    ),
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.language_model.layers.1.mlp.experts.down_proj",
    "up_proj",
]
KEYS = [
    *NAMES,
    "down_proj",
    "1.up_proj",
    "experts.1.up_proj",
    "experts.gate_up_proj",
    "p_proj",
    "up.proj",
    "model.layers",
    "layers.1.mlp.experts.11.down.proj",
    r".*\.gate_up_proj",
    r"experts\.\d+\.up_proj",
    r"experts\.(1|11)\.down_proj",
    r"^model.layers.1.mlp.experts.1.up_proj",
    "up_proj|down_proj",
    r"layers\.1\..*",
    "[du].*_proj",
]


def peft_choice(table: dict[str, int], name: str) -> int | None:
    return table.get(get_pattern_key(list(table), name))


@given(keys=st.lists(st.sampled_from(KEYS), unique=True), name=st.sampled_from(NAMES))
def test_the_first_pattern_that_matches_wins_as_in_peft(keys: list[str], name: str) -> None:
    table = {key: value for value, key in enumerate(keys)}
    assert Patterns("rank_pattern", table).find(name) == peft_choice(table, name)


@given(key=st.text("abp.1_", min_size=1, max_size=6), name=st.text("abp.1_", min_size=1, max_size=8))
def test_plain_keys_match_as_in_peft(key: str, name: str) -> None:
    assert Patterns("rank_pattern", {key: 7}).find(name) == peft_choice({key: 7}, name)


def test_one_entry_for_every_expert_is_looked_up_quickly() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(40) for e in range(128)]
    patterns = Patterns("rank_pattern", {name: rank for rank, name in enumerate(names)})
    start = time.perf_counter()
    assert [patterns.find(name) for name in names] == list(range(len(names)))
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "key", ["(a*)*b", "(a|a)+b", "((a?){9}){9}", ".*.*.*.*.*b", ".?" * 30, "(.|.)" * 30, "(a", "[", "a{9,1}", "*"]
)
def test_patterns_that_are_wrong_or_could_take_for_ever_are_refused(key: str) -> None:
    with pytest.raises(AdapterRefusedError) as caught:
        Patterns("alpha_pattern", {key: 1.0})
    assert caught.value.key == "alpha_pattern"


def test_too_many_expressions_are_refused() -> None:
    with pytest.raises(AdapterRefusedError, match="at most 256"):
        Patterns("alpha_pattern", {rf"x\.{i}": 1.0 for i in range(257)})


def test_slow_expressions_together_are_refused_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of a few KB must not keep the adapters of others waiting for hours."""
    monkeypatch.setattr(adapter_patterns, "MOST_SECONDS", 0.05)
    slow = Patterns("rank_pattern", {f".*?.*?.*?.*?[YZ]{number:03}": 8 for number in range(20)})
    names = [f"model.layers.{layer}.mlp.experts.{expert}.gate_proj" for layer in range(48) for expert in range(128)]
    start = time.thread_time()
    with pytest.raises(AdapterRefusedError, match=r"rank_pattern.*within 0\.05 s"):
        list(map(slow.find, names))
    assert time.thread_time() - start < 2.0
    with pytest.raises(AdapterRefusedError):
        slow.find(names[0])


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = Patterns("alpha_pattern", {".*experts.*": 8.0})
    assert patterns.find("mlp.experts.0.gate_proj") == 8.0
    monkeypatch.setattr(patterns, "_first", None)
    assert patterns.find("mlp.experts.0.gate_proj") == 8.0
