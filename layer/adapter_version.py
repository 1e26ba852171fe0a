"""One loaded state of a named adapter, who uses it and where it sits, and what a name may be."""

import re
from dataclasses import dataclass

from .adapter import KeptAdapter
from .errors import RequestError

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""What an adapter's name must match, whole."""


def check_name(name: str, param: str = "lora_name") -> None:
    """Raise ``RequestError`` with ``param`` unless ``name`` matches ``NAME_PATTERN`` whole."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        shown = name if len(name) <= 140 else f"{name[:140]}…"
        raise RequestError(f"an adapter's name must match {NAME_PATTERN}, got {shown!r}", param)


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One loaded state of a named adapter; compared by identity, written to by ``AdapterTable`` alone.

    ``version``    1, 2, … of this name, never used twice
    ``in_flight``  requests that hold it
    ``holds``      parts of requests, waiting or being computed, that hold its slot
    ``slot``       its slot, or None
    ``ready``      its slot holds it whole; until then it is being installed there
    ``draining``   it is being unloaded: requests in flight finish, new ones are refused
    ``retired``    it is no longer current
    ``last_used``  orders versions by their last put, acquire or place
    """

    name: str
    version: int
    adapter: KeptAdapter
    pinned: bool = False
    in_flight: int = 0
    holds: int = 0
    slot: int | None = None
    ready: bool = False
    draining: bool = False
    retired: bool = False
    last_used: int = 0

    @property
    def installing(self) -> bool:
        """Whether it is on its way into its slot."""
        return self.slot is not None and not self.ready

    @property
    def in_use(self) -> bool:
        """Whether a request holds it or its slot, or it is being installed."""
        return self.in_flight > 0 or self.holds > 0 or self.installing

    @property
    def keeps_slot(self) -> bool:
        """Whether the slot that it sits in cannot be taken for another now."""
        return self.holds > 0 or not self.ready or (self.pinned and not self.retired)
