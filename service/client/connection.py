"""HTTP to one service: connections kept alive, a name for every request, and errors as exceptions."""

import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import httpx
import orjson

from ...layer.errors import ConfigurationError, RequestError
from .errors import ServiceError, ServiceTimeoutError, ServiceUnreachableError

GRACE_S = 0.5
"""How much longer than the service the client waits, so that the service is the one to say that time is up."""

KEPT_S = 3.0
"""How long an idle connection is kept: less than the service keeps it, so that no request meets its end."""

LONGEST_S = 86400.0
"""How long anything is waited for at most: as long as a service may let a request take."""

KEY = re.compile(r"[\x21-\x7e]{1,512}")

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
        # Compressing tensors costs far more time than sending them.
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = bearer(api_key)
        base = "http://localhost" if scheme == "unix" else url
        self.url = url
        self.timeout_s = timeout_s
        waits_s = bounded(timeout_s) + GRACE_S
        self._http = httpx.Client(base_url=base, headers=headers, timeout=waits_s, limits=_LIMITS, transport=transport)

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
        if self._http.is_closed:
            raise ServiceUnreachableError(f"the client of {self.url} is closed", request_id=request_id)
        named = {"X-Request-Id": request_id, **(headers or {})}
        seconds = bounded(self.timeout_s if timeout_s is None else timeout_s)
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

    def get(self, path: str) -> Any:
        """The JSON of a GET. Raises ``ServiceError``."""
        return orjson.loads(self.send("GET", path, repeatable=True).content)

    def close(self) -> None:
        """Close every connection."""
        self._http.close()


def bearer(api_key: str) -> str:
    """The header that sends ``api_key``, without the line's end that secrets kept in files have. Raises
    ``ConfigurationError``, which does not tell it."""
    key = api_key.strip()
    if KEY.fullmatch(key) is None:
        raise ConfigurationError("api_key should be 1 to 512 visible ASCII characters")
    return f"Bearer {key}"


def bounded(timeout_s: float) -> float:
    """``timeout_s``, or ``LONGEST_S`` where it is longer. Raises ``RequestError`` for what is no time."""
    if not timeout_s >= 0:
        raise RequestError(f"timeout_s should be a number of seconds, 0 or more, got {timeout_s!r}", "timeout_s")
    return float(min(timeout_s, LONGEST_S))


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
