"""Every error that moelet raises on purpose goes from one process to another, and is copied, with all that it says."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from moelet.layer.errors import MoeletError

PACKAGES = ("moelet.layer", "moelet.graphs", "moelet.service")


def kinds(base: type[MoeletError]) -> Iterator[type[MoeletError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def all_kinds() -> list[type[MoeletError]]:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    return sorted({kind for kind in kinds(MoeletError) if kind.__module__.startswith("moelet.")}, key=str)


def made(kind: type[MoeletError]) -> MoeletError:
    """One of ``kind``, with a value of its own for each argument."""
    if kind.__init__ is Exception.__init__:
        return kind("what happened")
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind).parameters.items()):
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = f"the {name}"
        else:
            positional.append(f"the {name}")
    return kind(*positional, **named)


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_elsewhere(kind: type[MoeletError]) -> None:
    error = made(kind)
    error.add_note("and where")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_kinds_that_take_more_than_a_sentence_are_among_them() -> None:
    assert {"CompileError", "AdapterRefusedError", "DriverError", "ServiceError"} <= {k.__name__ for k in all_kinds()}
