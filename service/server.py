"""Runs the application under uvicorn with signal handling of its own: drain, finish, exit 0."""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from types import FrameType

import torch
import uvicorn
from rich.console import Console

from .adapter_reading import AdapterReader
from .adapter_roots import AdapterRoots
from .app import create_app
from .garbage import search_seldom
from .http_config import http_config
from .keys import Keys
from .limits import MIB
from .listener import address, bound, listen
from .reading_process import ReadingProcess
from .service import MoeService
from .settings import Settings
from .startup import open_service

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_END_S = 3.0
"""How long a start that is ended has for putting things away."""
TICK_S = 0.1
"""How long a signal that ends a start may go unheard: one that comes just before the main thread waits for another,
or that the kernel hands to another, does not wake it."""
SWITCH_INTERVAL_S = 5e-4
"""How long a Python thread may keep others waiting: the event loop's, the engine's, and one that reads adapters."""


def serve(settings: Settings) -> int:
    """Serve until a signal or a failure of the engine; the exit code.

    Raises ``MoeletError`` for whatever stands in the way of starting, before the port opens.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with exit_on_signal(), ExitStack() as ending, bound(settings) as listener:
        ending.enter_context(torch.no_grad())  # in this thread, which makes a view or two of every request
        service = open_service(settings, partial(read_beside, ending))
        app = create_app(service, max_body_bytes=int(settings.max_body_mb * MIB), keys=keys_of(settings))
        metrics = service.metrics
        config = http_config(
            app,
            body_timeout_s=settings.body_timeout_s,
            known=app.known,
            refused=metrics.answered,
            ended=metrics.connection_ended,
        )
        search_seldom()  # which requests would feel
        listen(listener, config.backlog)
        log.info("serving on %s", address(listener))
        warn_of_openness(listener, settings)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(Server(config, service).serve(sockets=[listener]))
        log.info("stopped")
        return 1 if service.lifecycle.failure is not None else 0


def warn_of_openness(listener: socket.socket, settings: Settings) -> None:
    """Say so when whoever reaches this machine may use the service."""
    if listener.family == socket.AF_UNIX or settings.api_key or is_loopback(listener.getsockname()[0]):
        return
    changes = "" if settings.admin_api_key or not (settings.adapter_root or settings.demo) else " and load adapters"
    log.warning("whoever reaches %s may use this service%s: it has no --api-key", address(listener), changes)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, an address."""
    return ip_address(host.partition("%")[0]).is_loopback


def keys_of(settings: Settings) -> Keys:
    """The keys that ``settings`` name."""
    admin = settings.admin_api_key
    api = [key.get_secret_value() for key in settings.api_key]
    return Keys(api, None if admin is None else admin.get_secret_value())


class Server(uvicorn.Server):
    """uvicorn's server, which on the first signal drains before it closes its listener.

    While it drains the listener still answers: ``/ready`` and new forwards with 503. A second
    signal ends the process at once, with 128 + the signal's number.
    """

    client_grace_s = 5.0
    """How long clients have, once nothing is in flight any more, to send the rest of a body or to
    read their answer; then their connections end, as one of them could otherwise hold the process for ever."""

    def __init__(self, config: uvicorn.Config, service: MoeService) -> None:
        super().__init__(config)
        self.service = service
        service.metrics.watch_connections(lambda: len(self.server_state.connections))
        self._stopping: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Listen to ``SIGNALS`` while the loop runs; nothing is raised again afterwards."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.on_signal, number)
        signal.setitimer(signal.ITIMER_REAL, 0)  # the loop wakes for each
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def on_signal(self, number: signal.Signals) -> None:
        """Drain on the first, end on the second."""
        if self._stopping is not None:
            log.warning("a second %s: ending at once", number.name)
            os._exit(128 + number)
        log.info("%s: draining, %d requests in flight", number.name, self.service.lifecycle.in_flight)
        self.service.lifecycle.begin_drain()
        self._stopping = asyncio.get_running_loop().create_task(self._stop_when_idle())

    async def on_tick(self, counter: int) -> bool:
        """Stop as well once the engine has failed: only a new process can recover."""
        if self.service.lifecycle.failure is not None:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close every connection, those of clients that do nothing included, and stop the application."""
        ending = asyncio.get_running_loop().call_later(self.client_grace_s, self._abort_connections)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _stop_when_idle(self) -> None:
        await self.service.lifecycle.idle()
        self.should_exit = True


def read_beside(processes: ExitStack, *ways: AdapterReader, roots: AdapterRoots) -> ReadingProcess | None:
    """A process for reading adapters in ``ways``, those of clients below ``roots``, of which this one feels nothing,
    until ``processes`` are closed.

    None where there cannot be one, or should not: a fork would never see locks released that other threads hold, and
    pages that a GPU reads or writes should have no second owner.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or threading.active_count() > 1 or in_use:
        return None
    try:
        reading = ReadingProcess(*ways, roots=roots)
    except OSError as error:
        log.warning("no process can be started that reads adapters, and loads will disturb forwards: %s", error)
        return None
    processes.callback(reading.close)
    return reading


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Let a signal that comes before the loop runs end the process, with exit code 0 and not waiting
    for the threads that load; and a second one at once, whatever the first has still to put away. Until the loop runs
    the main thread looks for signals every ``TICK_S``."""
    ends = math.inf

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal ends
        if ends < math.inf:
            os._exit(0)
        ends = time.monotonic() + LONGEST_END_S
        raise SystemExit(0)

    def tick(_number: int, _frame: FrameType | None) -> None:
        if time.monotonic() > ends:  # what ran when the signal came may have swallowed the exception
            os._exit(0)

    handlers = dict.fromkeys(SIGNALS, stop) | {signal.SIGALRM: tick}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    except SystemExit as stopped:
        Console(stderr=True).show_cursor()
        os._exit(stopped.code if isinstance(stopped.code, int) else 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
