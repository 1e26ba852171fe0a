"""The Python client: tensors in, tensors out, and adapters loaded, replaced and unloaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Generic, NoReturn
from urllib.parse import quote

import httpx
import orjson

from ...layer.errors import RequestError
from .connection import Connection, bounded
from .errors import ServiceError
from .tensors import Tensor, receive_like, send_floats, send_hidden_states, send_ids
from .wire import HEADER, WireTensor, decode, encode, encode_names

Record = dict[str, Any]
"""One adapter or layer as the service tells of it."""


@dataclass(frozen=True, slots=True)
class ForwardAnswer(Generic[Tensor]):
    """A layer's output ``[T, H]``, the version of each adapter it was computed with, and the request's id."""

    hidden_states: Tensor
    adapter_versions: Mapping[str, int]
    request_id: str


class Client:
    """One moelet service. May be used from any number of threads at once; ``with`` closes its connections. A copy of
    it is itself, and it cannot be pickled.

    ``url``        ``http://host:port``, ``https://…``, or ``unix:/path/to/socket``
    ``api_key``    sent with every call; loading and unloading may need the service's admin key
    ``timeout_s``  how long to wait for an answer, where a call does not say
    ``transport``  what carries the requests, by default httpx over TCP or the Unix socket

    Every method raises ``ServiceError``, which carries the status, the message and the request's id.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = Connection(url, api_key, timeout_s, transport)

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._connection.url

    def forward(
        self,
        layer: int,
        hidden_states: Tensor,
        *,
        topk_ids: Any = None,
        topk_weights: Any = None,
        router_logits: Any = None,
        adapter: str | None = None,
        adapters: Sequence[str | None] | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """The output of ``layer``, ``[T, H]`` of the kind, dtype and device of ``hidden_states``.

        ``hidden_states``  ``[T, H]``, bf16, fp16 or fp32: a torch tensor on any device, or a numpy array
        ``topk_ids``       ``[T, top_k]`` int32 or int64, -1 for no expert; with
        ``topk_weights``   ``[T, top_k]``, used as sent; or
        ``router_logits``  ``[T, E]``, routed by the checkpoint's method; or neither: the checkpoint's gate routes
        ``adapter``        one name for all tokens; or
        ``adapters``       a name or None for each token
        ``timeout_s``      after which the service gives up

        The layer computes in bf16: it rounds what it takes and what it gives. Raises ``RequestError`` for what
        cannot be sent, and ``ServiceError``.
        """
        return self.answer(
            layer,
            hidden_states,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            router_logits=router_logits,
            adapter=adapter,
            adapters=adapters,
            timeout_s=timeout_s,
        ).hidden_states

    def answer(
        self,
        layer: int,
        hidden_states: Tensor,
        *,
        topk_ids: Any = None,
        topk_weights: Any = None,
        router_logits: Any = None,
        adapter: str | None = None,
        adapters: Sequence[str | None] | None = None,
        timeout_s: float | None = None,
    ) -> ForwardAnswer[Tensor]:
        """``forward``, with the adapter versions that answered."""
        if adapter is not None:
            _check_name(adapter, "adapter should be a name, or None for the base", "adapter")
        inputs = [send_hidden_states(hidden_states)]
        if topk_ids is not None:
            inputs.append(send_ids("topk_ids", topk_ids))
        for name, value in (("topk_weights", topk_weights), ("router_logits", router_logits)):
            if value is not None:
                inputs.append(send_floats(name, value))
        if adapters is not None:
            inputs.append(_names_tensor(adapters, adapter, inputs[0].shape[0]))
        body, head = encode(inputs, {} if adapter is None else {"adapter": adapter})
        headers = {HEADER: str(head), "Content-Type": "application/octet-stream"}
        if timeout_s is not None:
            headers["X-Request-Timeout-Ms"] = str(max(1, round(bounded(timeout_s) * 1000)))
        path = f"/v2/models/layers.{_number_of(layer)}/infer"
        response = self._connection.send(
            "POST", path, content=body, headers=headers, timeout_s=timeout_s, repeatable=True
        )
        request_id = response.headers.get("X-Request-Id", "")
        try:
            bits, versions = decode(response.content, response.headers.get(HEADER), inputs[0].shape)
        except ValueError as error:
            said = f"the answer breaks the protocol: {error}"
            raise ServiceError(said, status=response.status_code, request_id=request_id) from error
        return ForwardAnswer(receive_like(bits, hidden_states), versions, request_id)

    def load_adapter(
        self, name: str, path: str | PathLike[str], *, replace: bool = False, pinned: bool | None = None
    ) -> Record:
        """Load the adapter in the folder ``path`` of the service's machine; its record. The next call sees it.

        ``replace``  put it in the place of an adapter of this name, as a new version; otherwise that is an error
        ``pinned``   never evict it; None keeps what a replaced adapter had
        """
        sent: Record = {} if pinned is None else {"pinned": pinned}
        if replace:
            return self._json("PUT", _path_of(name), sent | {"path": fspath(path)})
        self._send("POST", "/v1/load_lora_adapter", sent | {"lora_name": name, "lora_path": fspath(path)})
        return self.adapter(name)

    def unload_adapter(self, name: str, *, timeout_s: float = 30.0) -> Record:
        """Unload ``name`` once no request holds it; its last record. ``ServiceError`` 409 where one still does after
        ``timeout_s`` seconds, and 400 where those are more than 600."""
        waits = bounded(timeout_s) + self._connection.timeout_s
        path = f"{_path_of(name)}?timeout_s={quote(str(float(timeout_s)))}"
        record: Record = orjson.loads(self._connection.send("DELETE", path, timeout_s=waits).content)
        return record

    def adapter(self, name: str) -> Record:
        """The record of one loaded adapter."""
        record: Record = self._connection.get(_path_of(name))
        return record

    def adapters(self) -> list[Record]:
        """The record of every loaded adapter, by name."""
        records: list[Record] = self._connection.get("/v1/adapters")["adapters"]
        return records

    def layers(self) -> list[Record]:
        """The layers served: ``layer``, sizes, routing and plans of each."""
        records: list[Record] = self.describe()["layers"]
        return records

    def describe(self) -> Record:
        """What is served: the model, its device, its ``layers``, and why each other layer is ``skipped``."""
        described: Record = self._connection.get("/v1/layers")
        return described

    def close(self) -> None:
        """Close the connections; the client is unusable afterwards."""
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __copy__(self) -> "Client":
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Client":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Client cannot be pickled, and neither can a model whose experts it calls: its connections are this "
            "process's, and its key is for nobody else. Make another from its URL; of the model save the state_dict"
        )

    def _json(self, method: str, path: str, sent: Record) -> Record:
        answer: Record = orjson.loads(self._send(method, path, sent).content)
        return answer

    def _send(self, method: str, path: str, sent: Record) -> httpx.Response:
        try:
            content = orjson.dumps(sent)
        except TypeError as error:
            raise RequestError(f"{sent} cannot be sent as JSON: {error}") from None
        return self._connection.send(method, path, content=content, headers={"Content-Type": "application/json"})


def _names_tensor(adapters: Sequence[str | None], adapter: str | None, num_tokens: int) -> WireTensor:
    if adapter is not None:
        raise RequestError("give adapter for all tokens or adapters for each, not both", "adapters")
    if len(adapters) != num_tokens:
        raise RequestError(f"adapters should be one for each of {num_tokens} tokens, got {len(adapters)}", "adapters")
    for name in set(adapters):
        if name is not None:
            _check_name(name, "adapters should hold names and None", "adapters")
    return WireTensor("adapter", "BYTES", [len(adapters)], encode_names(adapters))


def _check_name(name: object, wanted: str, param: str) -> None:
    """Raise ``RequestError`` for what could not be the name of an adapter."""
    if not isinstance(name, str) or not name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise RequestError(f"{wanted}, got {name!r}", param)


def _number_of(layer: Any) -> int:
    """``layer`` as an int. Raises ``RequestError`` for what is none."""
    try:
        return index(layer)
    except TypeError:
        raise RequestError(f"layer should be the number of a layer, got {layer!r}", "layer") from None


def _path_of(name: str) -> str:
    _check_name(name, "name should be that of an adapter", "name")
    return f"/v1/adapters/{quote(name, safe='')}"
