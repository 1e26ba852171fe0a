"""Notices clients that go away before they are answered, at next to no cost for those that are answered soon."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

WATCH_AFTER_S = 0.05
"""So long a client waits, and up to twice that, before it is watched; most are answered earlier."""

Result = TypeVar("Result")


class _Client:
    __slots__ = ("left", "looked_at", "receive", "task", "watcher")

    def __init__(self, task: "asyncio.Task[object]", receive: Receive) -> None:
        self.task = task
        self.receive = receive
        self.watcher: asyncio.Task[None] | None = None
        self.looked_at = False
        self.left = False


class Departures:
    """Ends the waiting of requests whose clients have gone; used on one event loop.

    uvicorn does not cancel the task of a request whose connection ends: only who awaits ``receive`` learns of it.
    One timer for all looks every ``WATCH_AFTER_S`` for requests that have waited since it last looked, and sets a
    task on each of them that does. A request that is answered before costs an entry in a dict.
    """

    def __init__(self) -> None:
        self._clients: dict[_Client, None] = {}
        self._will_look = False

    async def unless_gone(self, work: Awaitable[Result], receive: Receive) -> Result:
        """Await ``work`` on behalf of the client behind ``receive``, whose body has been read to its end.

        ``work`` is cancelled when the client goes away. Raises ``ClientDisconnect`` then, else what ``work`` raises.
        """
        task = asyncio.current_task()
        assert task is not None
        client = _Client(task, receive)
        self._clients[client] = None
        if not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)
        try:
            return await work
        except asyncio.CancelledError:
            if not client.left:
                raise
            task.uncancel()
            raise ClientDisconnect from None
        finally:
            del self._clients[client]
            if client.watcher is not None:
                client.watcher.cancel()
                client.watcher = None  # its end holds a traceback, and that the client

    def _look(self) -> None:
        for client in self._clients:
            if client.looked_at and client.watcher is None:
                client.watcher = asyncio.get_running_loop().create_task(self._watch(client))
            client.looked_at = True
        self._will_look = bool(self._clients)
        if self._clients:
            asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)

    async def _watch(self, client: _Client) -> None:
        while (await client.receive())["type"] != "http.disconnect":
            pass
        if client in self._clients:
            client.left = True
            client.task.cancel()
