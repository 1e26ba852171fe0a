"""Inference requests as bytes, and two services that answer the same: past the application, and through it."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from eventually import eventually
from moelet.service.v2.direct import DirectInference
from raw_http import LAST, answered, answers, connected, spoken, until_closed
from running_service import OpenEngine, RunningService, hidden_states, running
from v2_wire import request

INFER = b"/v2/models/layers.1/infer"
BINARY = {"parameters": {"binary_data_output": True}}
COUNTED = (
    "moelet_requests",
    "moelet_request_seconds",
    "moelet_tokens",
    "moelet_http_responses",
    "moelet_connections_ended",
)
DATE = re.compile(rb"date: [^\r]*\r\n")
MADE_ID = re.compile(rb"(?<=x-request-id: )[0-9a-f]{32}")

Answers = list[tuple[int, dict[str, str], bytes]]


def head(length: object, *lines: bytes, path: bytes = INFER, end: bytes = b"\r\n") -> bytes:
    """The head of an inference whose body has ``length`` bytes, ``lines`` among its headers."""
    said = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %b" % str(length).encode(), *lines, b"", b""]
    return end.join(said)


def infer(body: bytes, json_bytes: int | None, *lines: bytes, path: bytes = INFER) -> bytes:
    """A whole inference, ``json_bytes`` of its body JSON (None: all)."""
    if json_bytes is not None:
        lines = (b"Inference-Header-Content-Length: %d" % json_bytes, *lines)
    return head(len(body), *lines, path=path) + body


def asking(num_tokens: int, *lines: bytes, seed: int = 0, **fields: Any) -> bytes:
    """A right inference of so many tokens, with ``lines`` among its headers and ``fields`` in its JSON."""
    sent = {"hidden_states": hidden_states(num_tokens, seed)}
    return infer(*request(sent, **{**BINARY, **fields}), *lines)


def left_and_late(service: RunningService, num_tokens: int, clients: int) -> bytes:
    """What is said where one client leaves and one is answered too late while the engine has their tensors, and
    ``clients`` more ask meanwhile."""
    with ExitStack() as open_, service.engine.closed():
        leaves, late = (open_.enter_context(connected(service)) for _ in range(2))
        leaves.sendall(asking(num_tokens, b"X-A: 4", seed=1))
        assert service.engine.waiting.wait(10)
        leaves.close()
        eventually(lambda: service.service.lifecycle.in_flight == 0)
        late.sendall(asking(num_tokens, b"X-A: 5", b"X-Request-Timeout-Ms: 100", seed=2) + LAST)
        said = until_closed(late)
        more = [open_.enter_context(connected(service)) for _ in range(clients)]
        for seed, client in enumerate(more, 3):
            client.sendall(asking(num_tokens, b"X-A: 4", seed=seed) + LAST)
        eventually(lambda: service.service.lifecycle.in_flight == len(more))
        service.engine.gate.set()
        return said + b"".join(map(until_closed, more))


def unmade(said: bytes) -> bytes:
    """What a service said, less what it makes anew each time: the date, and ids of requests that brought none."""
    return MADE_ID.sub(b"0" * 32, DATE.sub(b"", said))


def counted(service: RunningService) -> dict[tuple[str, ...], float]:
    """Every counter of requests, answers and connections that is not 0, as it is between two turns of the loop."""

    async def collected() -> list[Metric]:
        return [family for family in service.service.metrics.registry.collect() if family.name in COUNTED]

    families = asyncio.run_coroutine_threadsafe(collected(), service.service._batcher._loop).result(10)
    samples = [sample for family in families for sample in family.samples if sample.name.endswith(("_total", "_count"))]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples if sample.value}


class Pair:
    """The same service twice, ``fast`` with the way past the application and ``slow`` without; ``begun`` tells of
    each request that came whole on that way whether it was answered there."""

    def __init__(self, fast: RunningService, slow: RunningService, begun: list[bool]) -> None:
        self.fast = fast
        self.slow = slow
        self.begun = begun

    def same(self, *parts: bytes, pause_s: float = 0.0) -> Answers:
        """What both answer to ``parts``, which end the connection."""
        return self.of_both(lambda service: spoken(service, _paused(parts, pause_s)))

    def same_behind(self, first: bytes, *parts: bytes) -> Answers:
        """What both answer to ``first``, and then to ``parts``: those are sent once that is answered."""

        def act(service: RunningService) -> bytes:
            with connected(service) as client:
                said = answered(client, first)
                for part in parts:
                    client.sendall(part)
                return said + until_closed(client)

        return self.of_both(act)

    def in_turn(self, *sent: bytes) -> list[int]:
        """The statuses of both to all of ``sent`` on one connection, each behind the last one's answer."""

        def act(service: RunningService) -> bytes:
            with connected(service) as client:
                said = b"".join(answered(client, each) for each in sent)
                client.sendall(LAST)
                return said + until_closed(client)

        return [status for status, *_ in self.of_both(act)][: len(sent)]

    def of_both(self, act: Callable[[RunningService], bytes]) -> Answers:
        """What both say to what ``act`` does: the same, also by what they count."""
        self.begun.clear()
        said, expected = unmade(act(self.fast)), unmade(act(self.slow))
        assert said == expected
        eventually(self.settled)
        return answers(said)

    def settled(self) -> bool:
        """Whether nothing is in flight, nothing is held, and both have counted the same."""
        for service in (self.fast.service, self.slow.service):
            held = sum(service.adapters.in_flight_by_name().values())
            if service.lifecycle.in_flight or service.metrics.requests_in_flight or held:
                return False
        return counted(self.fast) == counted(self.slow)


def _paused(parts: tuple[bytes, ...], pause_s: float) -> Iterator[bytes]:
    for part in parts:
        yield part
        time.sleep(pause_s)


@contextmanager
def paired(open_engine: OpenEngine, root: Path | None, **options: Any) -> Iterator[Pair]:
    """A ``Pair`` over the adapters ``a`` and ``b``, if there is a root, with the ``options`` of ``running``."""
    begin = DirectInference.begin
    begun: list[bool] = []

    def noted(self: DirectInference, *arguments: Any) -> Any:
        answering = begin(self, *arguments)
        begun.append(answering is not None)
        return answering

    with ExitStack() as open_, pytest.MonkeyPatch.context() as patched:
        patched.setattr(DirectInference, "begin", noted)
        fast, slow = (open_.enter_context(running(open_engine, root, fast=fast, **options)) for fast in (True, False))
        for service in (fast, slow) if root else ():
            for seed, name in enumerate(("a", "b")):
                service.load(name, service.write(name, seed))
        yield Pair(fast, slow, begun)
