"""``POST /v2/models/{model}/infer``: one forward of one layer, from the raw request to the raw reply."""

from ..compression import WINDOWS, compressed
from ..deadline import TIMEOUT_HEADER
from ..service import MoeService
from .bodies import Headers, read_body
from .codec import read_inference, write_answer
from .exchange import JSON, OCTETS, Header, Incoming, Reply
from .header import read_header_length
from .layout import remembering
from .models import Models

TIMEOUT = TIMEOUT_HEADER.lower().encode()
JSON_BYTES = b"inference-header-content-length"


class Inferences:
    """Answers inference requests; bodies expand to ``max_body_bytes`` at most."""

    def __init__(self, service: MoeService, max_body_bytes: int) -> None:
        self.models = Models(service)
        self.layouts = {spec.index: remembering(spec) for spec in self.models.layers.values()}
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def infer(self, incoming: Incoming) -> Reply:
        """Compute the layer that the path names over the tokens of the body."""
        service, headers = self._service, incoming.headers
        with service.metrics.forward() as watch:
            spec = self.models.layer(*incoming.names)
            watch.layer = str(spec.index)
            service.check_admission()
            deadline = service.timeouts.from_header(sent_timeout(headers))
            header_length = read_header_length(headers.get(JSON_BYTES))
            body = await read_body(headers, incoming.receive, header_length or 0, self._max_body_bytes)
            asked = read_inference(body, header_length, spec, self.layouts[spec.index])
            del body  # while the request waits it is kept as far as tensors are views of it
            watch.num_tokens = asked.call.batch.num_tokens
            deadline = deadline.within(asked.request.timeout)
            answer = await service.forward_for_client(asked.call, deadline, incoming.receive)
            pieces, json_length = write_answer(answer, asked.request, incoming.names[0])
        return await _reply(pieces, json_length, headers)


def sent_timeout(headers: Headers) -> str | None:
    """What ``X-Request-Timeout-Ms`` says, unchecked."""
    value = headers.get(TIMEOUT)
    return None if value is None else value.decode("latin-1")


def content_headers(json_length: int | None) -> tuple[Header, ...]:
    """The headers that say what an answer is whose first ``json_length`` bytes are JSON (None: all)."""
    return (JSON,) if json_length is None else (OCTETS, (JSON_BYTES, b"%d" % json_length))


async def _reply(pieces: list[bytes | memoryview], json_length: int | None, headers: Headers) -> Reply:
    """The reply, compressed for who accepts that one compression alone: many clients list all they know in
    every request, and for tensors the bytes saved are not worth the time."""
    described = content_headers(json_length)
    coding = headers.get(b"accept-encoding", b"")
    if coding not in WINDOWS:
        return Reply(pieces, described)
    return Reply([await compressed(pieces, coding)], (*described, (b"content-encoding", coding)))
