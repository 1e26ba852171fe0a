"""A layer as a forward finds it: what was worked out once, so that little is left to do before the launch."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from .buffers import RoutingInput
from .pool import GraphPool, Runnable
from .staging import Staging
from .transfer import Transfer

WAYS_KEPT = 2048
"""Ways of a geometry that stay at hand: all of the default decode shapes, and some of more tokens."""


class Way(NamedTuple):
    """What runs a forward, and what it brings there and takes."""

    runnable: Runnable
    transfer: Transfer


FindWay = Callable[[int, RoutingInput, bool], Way]
"""The way by token count, routing input and whether any token has an adapter."""


class Served(NamedTuple):
    """A layer's head and what runs it; all but the head is the same for all layers of a geometry."""

    head: bytes
    most_tokens: int
    staging: Staging
    way: FindWay


def ways(pool: GraphPool, staging: Staging) -> FindWay:
    """The ways through ``pool`` and ``staging``, of up to the pool's most tokens."""

    @lru_cache(WAYS_KEPT)
    def way(num_tokens: int, routing: RoutingInput, lora: bool) -> Way:
        runnable = pool.runnable(num_tokens, routing, lora)
        return Way(runnable, staging.transfer(runnable.variant, runnable.arena, num_tokens))

    return way
