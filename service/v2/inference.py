"""``POST /v2/models/{model}/infer``: one forward of one layer, from the raw request to the raw reply."""

from ..compression import WINDOWS, compressed
from ..deadline import HEADER
from ..service import MoeService
from .bodies import Headers, read_body
from .codec import read_inference, write_answer
from .exchange import JSON, OCTETS, Header, Incoming, Reply
from .header import read_header_length
from .layout import remembering
from .models import Models

TIMEOUT = HEADER.lower().encode()


class Inferences:
    """Answers inference requests; bodies expand to ``max_body_bytes`` at most."""

    def __init__(self, service: MoeService, models: Models, max_body_bytes: int) -> None:
        self._service = service
        self._models = models
        self._max_body_bytes = max_body_bytes
        self._layouts = {spec.index: remembering(spec) for spec in models.layers.values()}

    async def infer(self, incoming: Incoming) -> Reply:
        """Compute the layer that the path names over the tokens of the body."""
        service, headers = self._service, incoming.headers
        with service.metrics.forward() as watch:
            spec = self._models.layer(*incoming.names)
            watch.layer = str(spec.index)
            service.check_admission()
            deadline = service.timeouts.from_header(_text(headers.get(TIMEOUT)))
            header_length = read_header_length(headers.get(b"inference-header-content-length"))
            body = await read_body(headers, incoming.receive, header_length or 0, self._max_body_bytes)
            asked = read_inference(body, header_length, spec, self._layouts[spec.index])
            del body  # while the request waits it is kept as far as tensors are views of it
            watch.num_tokens = asked.call.batch.num_tokens
            deadline = deadline.within(asked.request.timeout)
            answer = await service.forward_for_client(asked.call, deadline, incoming.receive)
            pieces, json_length = write_answer(answer, asked.request, incoming.names[0])
        return await _reply(pieces, json_length, headers)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


async def _reply(pieces: list[bytes | memoryview], json_length: int | None, headers: Headers) -> Reply:
    """The reply, compressed for who accepts that one compression alone: many clients list all they know in
    every request, and for tensors the bytes saved are not worth the time."""
    described: tuple[Header, ...] = (JSON,)
    if json_length is not None:
        described = (OCTETS, (b"inference-header-content-length", b"%d" % json_length))
    coding = headers.get(b"accept-encoding", b"")
    if coding not in WINDOWS:
        return Reply(pieces, described)
    return Reply([await compressed(pieces, coding)], (*described, (b"content-encoding", coding)))
