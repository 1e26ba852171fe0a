"""How much may wait for the engine, for how long, and how much goes into one of its calls."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the forwards of one service.

    ``max_batch_tokens``   tokens of one engine call; None: the engine's ``batch_tokens`` for several requests and for
                           one of several adapters, its ``most_tokens`` for any other
    ``max_queue``          requests of which nothing has entered a batch yet
    ``max_queue_bytes``    bytes of all tensors that wait; one request may exceed it alone
    ``queue_delay_s``      how long an under-filled batch waits for more while the engine is busy
    ``request_timeout_s``  how long a request may take
    """

    max_batch_tokens: int | None = None
    max_queue: int = 1024
    max_queue_bytes: int = 512 * MIB
    queue_delay_s: float = 0.0
    request_timeout_s: float = 60.0
