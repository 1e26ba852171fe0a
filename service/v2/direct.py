"""Inference requests answered straight from their connection: a head read once, no task, nothing in between.

What is not a plain and right request is left to the application, which says what is wrong with it.
"""

import logging
import re
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import cast

from starlette.requests import ClientDisconnect

from ...layer.errors import MoeletError
from ...layer.spec import LayerSpec
from ..compression import WINDOWS
from ..deadline import Deadline
from ..errors import response_for
from ..keys import Keys
from ..known_requests import Answering, Body, Write, header_lines
from ..plain_head import Head, UnusualError
from ..request_id import ID_HEADER, MadeIds, access, log_access, naming, sent_id
from ..service import MoeService
from ..watch import ForwardWatch
from ..work import Work, answer_of
from .bodies import Bodies
from .codec import MODEL_VERSION, Inference, read_inference, write_answer
from .header import InferRequest, read_header_length
from .inference import JSON_BYTES, Inferences, content_headers, sent_timeout
from .layout import LayoutReader

log = logging.getLogger(__name__)

BEGINNING = b"POST /v2/models/"
PATH = re.compile(r"/v2/models/([^/%?#]+)(?:/versions/([^/%?#]+))?/infer", re.ASCII)
REMEMBERED = 512
LONGEST = 2048
"""How many heads are kept, and the bytes of the longest that is: together they are what clients can fill."""


class DirectInferences:
    """Reads heads of inference requests over ``service``, with bodies of up to ``max_body_bytes``; ``inferences``,
    ``keys`` and ``made`` are those of the application."""

    def __init__(
        self, service: MoeService, inferences: Inferences, keys: Keys, made: MadeIds, max_body_bytes: int
    ) -> None:
        self.service = service
        self.made = made
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._inferences = inferences
        self._remembered = lru_cache(REMEMBERED)(self._read)

    def find(self, head: bytes) -> "DirectInference | None":
        """What answers requests that begin with ``head``, all of it; None: the application does.

        It does where no forward would be taken now, which it tells before the body is there.
        """
        if len(head) > LONGEST or not head.startswith(BEGINNING):
            return None
        try:
            self.service.check_admission()
            return self._remembered(head)
        except (UnusualError, MoeletError):
            return None

    def _read(self, head: bytes) -> "DirectInference":
        read = Head(head)
        path = read.url.decode("latin-1")
        matched = PATH.fullmatch(path)
        if matched is None:
            raise UnusualError
        body_bytes = read.body_bytes(self._max_body_bytes)
        if read.headers.get(b"accept-encoding") in WINDOWS:
            raise UnusualError
        if self._keys.right_of(read.listed) < self._keys.needed("POST", read.url):
            raise UnusualError
        spec = self._inferences.models.layer(matched[1], matched[2] or MODEL_VERSION)
        return DirectInference(self, read, path, body_bytes, matched[1], spec, self._inferences.layouts[spec.index])


class DirectInference:
    """What requests of one head come to: ``body_bytes`` follow it, to be read into ``new_body``."""

    def __init__(
        self,
        owner: DirectInferences,
        head: Head,
        path: str,
        body_bytes: int,
        model: str,
        spec: LayerSpec,
        read_layout: LayoutReader,
    ) -> None:
        self._owner = owner
        self.service = owner.service
        self.path = path
        self.model = model
        self.label = str(spec.index)
        self.body_bytes = body_bytes
        self._spec = spec
        self._read_layout = read_layout
        self._json_bytes = read_header_length(head.headers.get(JSON_BYTES))
        lend = None if self._json_bytes is None else self.service.engine.input_memory
        self.bodies = Bodies(self.body_bytes, self._json_bytes or 0, lend)
        self._timeout_s = self.service.timeouts.seconds(sent_timeout(head.headers))
        self._sent_id = sent_id(head.listed)

    def new_body(self) -> Body:
        """Memory for one body."""
        return self.bodies.take()

    def begin(self, body: Body, came: float, write: Write) -> Answering | None:
        """Begin to answer the request whose head ``came`` then, by ``time.monotonic``, with ``body`` behind it.

        None: nothing was begun, and the application has to answer.
        """
        service = self.service
        try:
            call, request, _ = self._read(body)
            if (num_tokens := call.batch.num_tokens) == 0:
                return None
            deadline = Deadline(came + self._timeout_s, self._timeout_s).within(request.timeout)
            answering = _Answering(self, body, request, came, write, self._sent_id or self._owner.made.new())
            answering.work = service.begin(call, deadline, answering.ended)
        except Exception:  # noqa: BLE001 - it comes again where the application answers, and is told and logged there
            return None
        watch = answering.watch = service.metrics.forward(came)
        watch.layer, watch.num_tokens = self.label, num_tokens
        return answering

    def _read(self, body: Body) -> Inference:
        """What ``body`` asks for: what the last one in the same memory did, where it has the same JSON."""
        octets, length = body.octets, self._json_bytes
        if body.read is not None:
            json, inference = body.read
            if json == octets[:length]:
                return cast(Inference, inference)
        inference = read_inference(octets, length, self._spec, self._read_layout)
        repeats = inference.repeats and self.bodies.keeps and length is not None
        body.read = (bytes(octets[:length]), inference) if repeats else None
        return inference


class _Answering:
    """One request that waits for its answer."""

    __slots__ = ("_body", "_came", "_of", "_request", "_request_id", "_write", "watch", "work")
    watch: ForwardWatch
    work: Work

    def __init__(
        self, of: DirectInference, body: Body, request: InferRequest, came: float, write: Write, request_id: bytes
    ) -> None:
        self._of = of
        self._body = None if body.read is None else body  # else it need not stay while the request waits
        self._request = request
        self._came = came
        self._write = write
        self._request_id = request_id

    def drop(self) -> None:
        """The client has gone."""
        self._of.service.drop(self.work)
        self._end(ClientDisconnect(), 0, time.monotonic())

    def ended(self, work: Work) -> None:
        """Answer with the output or the error of ``work``."""
        if work.error is not None:
            self._refuse(work.error)
            return
        try:
            pieces, json_bytes = write_answer(answer_of(work), self._request, self._of.model)
        except Exception as error:  # noqa: BLE001 - it is answered too
            self._refuse(error)
            return
        described = _described(json_bytes, sum(map(len, pieces)))
        answered = partial(self._end, None, 200, time.monotonic())
        try:
            self._write(200, b"%b%b: %b\r\n\r\n" % (described, ID_HEADER, self._request_id), pieces)
        finally:
            self._of.service.later(answered)
        del self.work  # and the output with it, as soon as it is sent
        if (body := self._body) is not None:
            self._body = None
            self._of.bodies.give_back(body)

    def _refuse(self, error: Exception) -> None:
        path = self._of.path
        if not isinstance(error, MoeletError):
            with naming(self._request_id):
                log.error("POST %s failed", path, exc_info=error)
        response = response_for(error, path)
        self._end(error, response.status_code, time.monotonic())
        described = header_lines([*response.raw_headers, (ID_HEADER, self._request_id)])
        body: Sequence[bytes | memoryview] = [bytes(response.body)]
        self._write(response.status_code, described + b"\r\n", body)

    def _end(self, error: BaseException | None, status: int, at: float) -> None:
        metrics = self._of.service.metrics
        self.watch.end(error, at)
        if status:
            metrics.answered(status)
        if access.isEnabledFor(logging.DEBUG):
            with naming(self._request_id):
                log_access("POST", self._of.path, status, at - self._came, self.watch)


@lru_cache(REMEMBERED)
def _described(json_bytes: int | None, length: int) -> bytes:
    """The header lines of an answer with a body of ``length`` bytes, ``json_bytes`` of them JSON (None: all)."""
    return header_lines([*content_headers(json_bytes), (b"content-length", b"%d" % length)])
