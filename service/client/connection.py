"""HTTP to one service: connections kept alive, a name for every request, and errors as exceptions."""

import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import httpx
import orjson

from ...layer.errors import ConfigurationError
from .errors import ServiceError, ServiceTimeoutError, ServiceUnreachableError

GRACE_S = 0.5
"""How much longer than the service the client waits, so that the service is the one to say that time is up."""

KEPT_S = 3.0
"""How long an idle connection is kept: less than the service keeps it, so that no request meets its end."""

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S)
_BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class Connection:
    """Connections to the service at ``url``: ``http://…``, ``https://…``, or ``unix:/path/to/socket``.

    May be used from any number of threads at once.
    """

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        scheme, _, rest = url.partition(":")
        if scheme not in ("http", "https", "unix") or not rest.strip("/"):
            raise ConfigurationError(f"a service's URL should be http://…, https://… or unix:/path, got {url!r}")
        if scheme == "unix":
            transport = transport or httpx.HTTPTransport(uds="/" + rest.lstrip("/"), limits=_LIMITS)
        self.url = url
        self.timeout_s = timeout_s
        base = "http://localhost" if scheme == "unix" else url
        try:
            self._http = httpx.Client(base_url=base, headers=_headers(api_key), limits=_LIMITS, transport=transport)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"{url!r} is no URL: {error}") from None

    def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        repeatable: bool = False,
    ) -> httpx.Response:
        """The answer, which is 2xx. Raises ``ServiceError``.

        ``timeout_s``   how long the service may take, by default that of the connection
        ``repeatable``  sent once more where a kept-alive connection proves to be closed
        """
        request_id = uuid4().hex
        named = {"X-Request-Id": request_id, **(headers or {})}
        seconds = self.timeout_s if timeout_s is None else timeout_s
        request = self._http.build_request(method, path, content=content, headers=named, timeout=seconds + GRACE_S)
        try:
            try:
                response = self._http.send(request)
            except _BROKEN:
                if not repeatable:
                    raise
                response = self._http.send(request)
        except httpx.TimeoutException:
            said = f"{self.url} did not answer {method} {path} within {seconds:g} s"
            raise ServiceTimeoutError(said, request_id=request_id) from None
        except httpx.TransportError as error:
            said = f"{self.url} cannot be reached: {error}"
            raise ServiceUnreachableError(said, request_id=request_id) from error
        if not response.is_success:
            raise _error(response, request_id)
        return response

    def json(
        self, method: str, path: str, sent: Mapping[str, Any] | None = None, *, has: str, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON object that answers ``sent``; it has the field ``has``. Raises ``ServiceError``."""
        body = None if sent is None else orjson.dumps(sent)
        headers = {} if sent is None else {"Content-Type": "application/json"}
        response = self.send(
            method, path, content=body, headers=headers, timeout_s=timeout_s, repeatable=method == "GET"
        )
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = None
        if isinstance(answer, dict) and has in answer:
            return answer
        raise broken(response, f"{method} {path} should answer an object with {has}")

    def close(self) -> None:
        """Close every connection."""
        self._http.close()


def broken(response: httpx.Response, why: str) -> ServiceError:
    """What to raise for an answer of 2xx that is not one of this service's."""
    request_id = response.headers.get("X-Request-Id") or response.request.headers["X-Request-Id"]
    return ServiceError(
        f"the answer is not a moelet service's: {why}", status=response.status_code, request_id=request_id
    )


def _headers(api_key: str | None) -> dict[str, str]:
    """What goes with every request. A key kept in a file has a line's end, which is no part of it."""
    # Compressing tensors costs far more time than sending them.
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        if re.fullmatch(r"[\x21-\x7e]+", api_key.strip()) is None:
            raise ConfigurationError("the API key should be visible ASCII characters, and has others or none")
        headers["Authorization"] = f"Bearer {api_key.strip()}"
    return headers


def _error(response: httpx.Response, request_id: str) -> ServiceError:
    """The exception for an answer that is not 2xx."""
    kind = ServiceTimeoutError if response.status_code == 504 else ServiceError
    retry_after = response.headers.get("Retry-After", "")
    return kind(
        _message(response),
        status=response.status_code,
        request_id=response.headers.get("X-Request-Id", request_id),
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
    )


def _message(response: httpx.Response) -> str:
    """What an error answer says: ``{"error": "…"}`` of the protocol, ``{"error": {"message": …}}`` of the rest,
    or the text of a proxy in between."""
    try:
        said = orjson.loads(response.content)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = response.text.strip()
        return f"the service answered {response.status_code} {response.reason_phrase}" + (
            f": {text[:200]}" * bool(text)
        )
