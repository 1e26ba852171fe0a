"""Which kernels programs ask for: found by building them over kernels that are not there."""

from collections.abc import Mapping
from typing import Any

from .arguments import ArgumentBlock
from .compiler import Specialisation
from .hazards import Work
from .kernel import Kernel, PreparedLaunch
from .streams import Stream


class AskedKernels:
    """Stands for ``Kernels`` and keeps what it is asked for; launches made of its kernels must not be launched."""

    def __init__(self) -> None:
        self._specialisations: dict[str, Specialisation] = {}

    @property
    def specialisations(self) -> Mapping[str, Specialisation]:
        """What was asked for, by its text, in the order of first asking."""
        return self._specialisations

    def get(self, specialisation: Specialisation, *, dynamic: bool = False) -> Kernel:  # noqa: ARG002
        """No kernel, but its launches can be prepared."""
        self._specialisations.setdefault(str(specialisation), specialisation)
        return _Absent()


class _Absent(Kernel):
    function: Any = None

    def __init__(self) -> None:
        """Nothing is loaded."""

    def prepare(self, *, stream: Stream, **_: Any) -> PreparedLaunch:
        nothing = Work("", reads=frozenset(), writes=frozenset(), waits=True)
        return PreparedLaunch(self, None, ArgumentBlock({}), stream, nothing)
