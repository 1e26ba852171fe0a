"""Loads of adapters answered straight from their connection: between forwards there is no time for more than that.

What is not a plain and right request is left to the application, which says what is wrong with it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from functools import lru_cache, partial

from ..layer.adapter_version import NAME_PATTERN
from ..layer.errors import MoeletError
from .errors import response_for
from .keys import Keys
from .known_requests import Body, Write, header_lines
from .plain_head import Head, UnusualError
from .request_id import ID_HEADER, MadeIds, access, current_request_id, log_access, naming, sent_id
from .routes.access import checked
from .routes.put_adapter import BEFORE_NAME, put
from .schemas import PutAdapter
from .service import MoeService

log = logging.getLogger(__name__)

BEGINNING = f"PUT {BEFORE_NAME}".encode()
PATH = re.compile(f"{re.escape(BEFORE_NAME)}({NAME_PATTERN})", re.ASCII)
REMEMBERED = 128
LONGEST = 2048
"""How many heads are kept, and the bytes of the longest that is: together they are what clients can fill."""
LONGEST_BODY = 1 << 16


class DirectLoads:
    """Reads heads of ``PUT /v1/adapters/{name}`` over ``service``; ``keys`` and ``made`` are the application's."""

    def __init__(self, service: MoeService, keys: Keys, made: MadeIds, max_body_bytes: int) -> None:
        self.service = service
        self.made = made
        self.under_way: set[asyncio.Task[None]] = set()
        self._keys = keys
        self._longest_body = min(max_body_bytes, LONGEST_BODY)
        self._remembered = lru_cache(REMEMBERED)(self._read)

    def find(self, head: bytes) -> "DirectLoad | None":
        """What answers requests that begin with ``head``, all of it; None: the application does."""
        if len(head) > LONGEST or not head.startswith(BEGINNING):
            return None
        try:
            return self._remembered(head)
        except UnusualError:
            return None

    def _read(self, head: bytes) -> "DirectLoad":
        read = Head(head)
        path = read.url.decode("latin-1")
        matched = PATH.fullmatch(path)
        if matched is None or self._keys.right_of(read.listed) < self._keys.needed("PUT", read.url):
            raise UnusualError
        return DirectLoad(self, path, matched[1], read.body_bytes(self._longest_body), sent_id(read.listed))


class DirectLoad:
    """What requests of one head come to: ``body_bytes`` follow it, to be read into ``new_body``."""

    def __init__(self, owner: DirectLoads, path: str, name: str, body_bytes: int, request_id: bytes | None) -> None:
        self.body_bytes = body_bytes
        self._owner = owner
        self._path = path
        self._name = name
        self._sent_id = request_id

    def new_body(self) -> Body:
        """Memory for one body."""
        return Body(memoryview(bytearray(self.body_bytes)))

    def begin(self, body: Body, came: float, write: Write) -> "_Loading | None":
        """Begin to answer the request whose head ``came`` then, by ``time.monotonic``, with ``body`` behind it.

        None: nothing was begun, and the application has to answer.
        """
        try:
            sent = checked(PutAdapter, bytes(body.octets))
        except MoeletError:
            return None
        loading = _Loading(write)
        request_id = self._sent_id or self._owner.made.new()
        task = asyncio.get_running_loop().create_task(self._load(sent, loading, request_id, came))
        self._owner.under_way.add(task)
        task.add_done_callback(self._owner.under_way.discard)
        return loading

    async def _load(self, sent: PutAdapter, loading: "_Loading", request_id: bytes, came: float) -> None:
        current_request_id.set(request_id.decode())
        service = self._owner.service
        try:
            with service.metrics.adapter_load():
                record, status = await put(service, self._name, sent)
            headers = b"content-length: %d\r\ncontent-type: application/json\r\n" % len(record)
        except Exception as error:  # noqa: BLE001 - it is answered too
            record, status, headers = self._refusal(error)
        loading.end(status, b"%b%b: %b\r\n\r\n" % (headers, ID_HEADER, request_id), [record])
        service.later(partial(self._answered, status, request_id, time.monotonic() - came))

    def _refusal(self, error: Exception) -> tuple[bytes, int, bytes]:
        if not isinstance(error, MoeletError):
            log.error("PUT %s failed", self._path, exc_info=error)
        response = response_for(error, self._path)
        return bytes(response.body), response.status_code, header_lines(response.raw_headers)

    def _answered(self, status: int, request_id: bytes, seconds: float) -> None:
        self._owner.service.metrics.answered(status)
        if access.isEnabledFor(logging.DEBUG):
            with naming(request_id):
                log_access("PUT", self._path, status, seconds, None)


class _Loading:
    """A load that waits for its answer; it goes on where its client leaves."""

    def __init__(self, write: Write) -> None:
        self._write: Write | None = write

    def drop(self) -> None:
        """The client has gone."""
        self._write = None

    def end(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Answer."""
        if self._write is not None:
            self._write(status, headers, body)
