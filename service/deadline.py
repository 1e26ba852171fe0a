"""Until when an answer is of use to whoever asked for it, and what ends a request that takes longer."""

import re
import time
from dataclasses import dataclass

from ..layer.errors import MoeletError, RequestError

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MILLISECONDS = re.compile(r"\d{1,300}(\.\d{1,300})?", re.ASCII)


class DeadlineExceededError(MoeletError):
    """The request took longer than it was given."""


@dataclass(slots=True, eq=False)
class Deadline:
    """The moment ``at`` (seconds of ``time.monotonic``), ``timeout_s`` after the request came."""

    at: float
    timeout_s: float

    def error(self) -> DeadlineExceededError:
        """What a request is told whose deadline has passed."""
        return DeadlineExceededError(f"the request was not answered within its {self.timeout_s * 1e3:g} ms")

    def within(self, microseconds: int | None) -> "Deadline":
        """The earlier of this and so long after the request came; None: this."""
        if microseconds is None or microseconds >= self.timeout_s * 1e6:
            return self
        return Deadline(self.at - self.timeout_s + microseconds * 1e-6, microseconds * 1e-6)

    def has_passed(self) -> bool:
        """Whether it is too late."""
        return time.monotonic() >= self.at

    def check(self) -> None:
        """Raise ``DeadlineExceededError`` once it has passed."""
        if self.has_passed():
            raise self.error()


class Timeouts:
    """Deadlines of requests that come now, none later than in ``longest_s``."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s

    def longest(self) -> Deadline:
        """The deadline of a request that asks for none."""
        return self.after(self.longest_s)

    def from_header(self, sent: str | None) -> Deadline:
        """The deadline of a request whose ``X-Request-Timeout-Ms`` is ``sent``. Raises ``RequestError``."""
        return self.after(self.seconds(sent))

    def seconds(self, sent: str | None) -> float:
        """What ``X-Request-Timeout-Ms`` asks for, as far as it is granted. Raises ``RequestError``."""
        if sent is None:
            return self.longest_s
        if MILLISECONDS.fullmatch(sent) is None or (milliseconds := float(sent)) == 0:
            wanted = f"{TIMEOUT_HEADER} should be milliseconds above 0 in plain decimals, such as 250 or 0.5"
            raise RequestError(f"{wanted}, got {sent!r}", TIMEOUT_HEADER)
        return min(milliseconds * 1e-3, self.longest_s)

    def after(self, seconds: float) -> Deadline:
        """``seconds`` from now."""
        return Deadline(time.monotonic() + seconds, seconds)
