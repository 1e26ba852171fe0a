"""A launch that touches more than it declares is found, on launches of plain Python over the fake driver's memory."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from declarations import false_declarations
from fake_driver import FakeDriver
from moelet.graphs.arena import Arena, ArenaPlan, BufferSpec
from moelet.graphs.streams import Stream

pytest.importorskip("cuda.bindings.driver")


@dataclass
class PythonLaunch:
    label: str
    reads: frozenset[str]
    writes: frozenset[str]
    stream: Stream
    launch: Callable[[], None]


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    FakeDriver().install(monkeypatch)
    arena = Arena(ArenaPlan("t", [BufferSpec(name, (3,), torch.float32) for name in "abcd"]))
    for value, name in enumerate("abcd"):
        arena.write(name, torch.full((3,), value + 1.0))
    return arena


def adding(arena: Arena, reads: str, writes: str, declared_reads: str, declared_writes: str) -> PythonLaunch:
    """Adds what it reads, plus one, into each buffer it writes."""

    def launch() -> None:
        total = sum(arena.read(name) for name in reads) + 1
        for name in writes:
            arena.write(name, total)

    declared = frozenset(declared_reads), frozenset(declared_writes)
    return PythonLaunch("sum", *declared, Stream("main"), launch)


@pytest.mark.parametrize(
    ("reads", "writes", "found"),
    [
        ("ab", "c", []),
        ("abc", "c", []),
        ("ab", "cd", ["sum writes d, which it does not declare"]),
        ("abd", "c", ["sum reads what it does not declare: c differs"]),
    ],
)
def test_what_is_not_declared_is_found(reads: str, writes: str, found: list[str], arena: Arena) -> None:
    launch = adding(arena, reads, writes, "ab" + ("c" if "c" in reads else ""), "c")
    assert false_declarations([launch], arena) == found


def test_every_launch_sees_what_the_one_before_it_wrote(arena: Arena) -> None:
    launches = [adding(arena, "ab", "c", "ab", "c"), adding(arena, "ac", "d", "ac", "d")]
    assert false_declarations(launches, arena) == []
    assert arena.read("c").tolist() == [4.0] * 3
    assert arena.read("d").tolist() == [6.0] * 3
