"""Keys: who may call what, decided from a request's raw path and method before anything else sees the request."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import sha256
from hmac import compare_digest

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_response

OPEN_PATHS = frozenset({b"/health", b"/ready", b"/v2/health/live", b"/v2/health/ready"})
"""Open to everybody, in this spelling alone: what orchestrators probe."""

READING = frozenset({"GET", "HEAD", "OPTIONS"})
V1_LAYERS, FORWARD = b"/v1/layers/", b"/forward"
V2_MODELS, INFER = b"/v2/models/", b"/infer"
V2_INDEX = b"/v2/repository/index"


class Right(IntEnum):
    """What a caller may do; each holds the ones before it."""

    NONE = 0
    USE = 1
    ADMINISTER = 2


class Keys:
    """The keys of one service; only digests of them are kept.

    Without an admin key every key may do everything; without an api key whatever needs no admin key is
    open. Whatever is not known to be a reading or a forward needs the admin key, so that a route that
    nobody thought of is closed.
    """

    def __init__(self, api_keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._api = tuple(digest(key.encode()) for key in api_keys)
        self._admin = None if admin_key is None else digest(admin_key.encode())

    def __bool__(self) -> bool:
        return bool(self._api) or self._admin is not None

    def needed(self, method: str, raw_path: bytes) -> Right:
        """The right that ``method`` on ``raw_path`` takes."""
        if raw_path in OPEN_PATHS:
            return Right.NONE
        if self._admin is not None and not only_uses(method, raw_path):
            return Right.ADMINISTER
        return Right.USE if self._api else Right.NONE

    def right_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Right:
        """The right of the one bearer key in ``headers``, in time that tells nothing of the keys."""
        sent = None
        for name, value in headers:
            if name == b"authorization":
                if sent is not None:
                    return Right.NONE
                sent = value
        if sent is None or sent[:7].lower() != b"bearer ":
            return Right.NONE
        found = digest(sent[7:].lstrip(b" "))
        right = Right.NONE
        for known in self._api:
            if compare_digest(found, known):
                right = Right.USE
        if self._admin is None:
            return Right.ADMINISTER if right else right
        return Right.ADMINISTER if compare_digest(found, self._admin) else right


def digest(key: bytes) -> bytes:
    """What is kept and compared of a key: always as long, whatever the key's length."""
    return sha256(key).digest()


def only_uses(method: str, raw_path: bytes) -> bool:
    """Whether the request reads or computes, and so changes nothing that other requests meet."""
    if method in READING:
        return True
    if method != "POST":
        return False
    if raw_path.endswith(INFER):
        return raw_path.startswith(V2_MODELS)
    if raw_path.endswith(FORWARD):
        return raw_path.startswith(V1_LAYERS)
    return raw_path == V2_INDEX


class KeyMiddleware:
    """Answers 401 to requests without a key that they need, and 403 to those whose key may not do that."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        needed = self.keys.needed(scope["method"], scope["raw_path"])
        if not needed or (right := self.keys.right_of(scope["headers"])) >= needed:
            await self.app(scope, receive, send)
        elif right:
            message = "this key is not enough: loading, unloading and changing take the service's admin key"
            await error_response(403, message, path=scope["path"])(scope, receive, send)
        else:
            kind = "the admin key" if needed is Right.ADMINISTER else "a key"
            sent = any(name == b"authorization" for name, _ in scope["headers"])
            came = "what came is none" if sent else "none came"
            message = f"{kind} of this service is needed, sent as 'Authorization: Bearer KEY': {came}"
            headers = {"WWW-Authenticate": "Bearer"}
            await error_response(401, message, headers=headers, path=scope["path"])(scope, receive, send)
