"""Keys over real HTTP: every route and spelling of a path, every way of sending a key, and what is told of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from moelet.service.app import routed
from moelet.service.keys import Keys, Right
from moelet.service.v2.app import routes as v2_routes
from moelet.service.v2.inference import Inferences
from raw_http import answers, spoken
from running_service import MAX_BODY_BYTES, OpenEngine, RunningService, hidden_states, running

USER, OLD_USER, ADMIN = "user-key", "older-user-key", "admin-key"
FORWARD = "/v1/layers/1/forward"
OPEN = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")
CHANGES = {
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("PUT", "/v1/adapters/{name}"),
    ("DELETE", "/v1/adapters/{name}"),
    ("POST", "/v2/repository/models/{adapter}/load"),
    ("POST", "/v2/repository/models/{adapter}/unload"),
}
"""The routes that take the admin key, spelled out here so that a new one has to be thought of."""


@pytest.fixture(scope="module")
def locked(open_engine: OpenEngine, adapter_root: Path) -> Iterator[RunningService]:
    """A service with two ordinary keys and an admin key."""
    with running(open_engine, adapter_root, keys=Keys([USER, OLD_USER], ADMIN)) as service:
        yield service


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def ask(service: RunningService, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    return service.client.request(method, path, headers=bearer(key), **options)


def assert_refused(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    error = answer.json()["error"]
    kind = {401: "AuthenticationError", 403: "PermissionDeniedError"}[status]
    assert (error["type"], error["param"], error["code"]) == (kind, None, status)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert answer.headers["x-request-id"]
    assert not any(key in answer.text for key in (USER, OLD_USER, ADMIN))


def routes_of(service: RunningService) -> set[tuple[str, str]]:
    """Every (method, path) that the application routes, those that it does not describe included."""
    app = routed(service.service, MAX_BODY_BYTES, Keys())
    described = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    of_v2 = {(route.method, route.path) for route in v2_routes(service.service, Inferences(service.service, 1), 1)}
    plain = {(method, r.path) for r in app.routes if isinstance(r, Route) for method in r.methods or ()}
    return described | of_v2 | plain


def test_every_route_but_the_probes_needs_a_key_and_every_change_the_admin_s(locked: RunningService) -> None:
    routes = routes_of(locked)
    assert {("GET", "/metrics"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/v1/models")} <= routes
    assert routes >= CHANGES
    for method, path in routes:
        spelled = path.replace("{layer}", "1").replace("{model}", "layers.1").replace("{version}", "1")
        spelled = spelled.replace("{name}", "absent").replace("{adapter}", "absent")
        if path in OPEN:
            assert ask(locked, method, spelled).status_code in (200, 405)
            continue
        for key in (None, "wrong"):
            assert ask(locked, method, spelled, key).status_code == 401, (method, path)
        assert (ask(locked, method, spelled, USER).status_code == 403) == ((method, path) in CHANGES), (method, path)
        assert ask(locked, method, spelled, ADMIN).status_code not in (401, 403), (method, path)


def described(service: RunningService, key: str | None = None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each (method, path, operation) of the service's OpenAPI document."""
    document = ask(service, "GET", "/openapi.json", key).json()
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert (name, scheme["type"], scheme["scheme"]) == ("key", "http", "bearer")
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def test_the_description_says_which_key_is_taken(locked: RunningService) -> None:
    told = set()
    for method, path, operation in described(locked, USER):
        told.add((method, path))
        assert operation.get("security") == (None if path in OPEN else [{"key": []}]), (method, path)
        assert ("401" in operation["responses"]) == (path not in OPEN)
        assert ("403" in operation["responses"]) == ((method, path) in CHANGES)
        error = operation["responses"].get("401", {}).get("content", {}).get("application/json", {}).get("schema")
        kind = "V2Error" if path.startswith("/v2") else "ErrorBody"
        assert error == (None if path in OPEN else {"$ref": f"#/components/schemas/{kind}"})
    assert told >= CHANGES


@pytest.mark.parametrize("admin_key", [None, ADMIN])
def test_a_key_is_optional_where_none_is_taken(open_engine: OpenEngine, admin_key: str | None) -> None:
    with running(open_engine, None, keys=Keys([], admin_key)) as service:
        for method, path, operation in described(service):
            needed = admin_key is not None and (method, path) in CHANGES
            expected = [{"key": []}] if needed else [{}, {"key": []}]
            assert operation.get("security") == (None if path in OPEN else expected), (method, path)
            assert ("401" in operation["responses"]) == needed


@pytest.mark.parametrize("key", [USER, OLD_USER, ADMIN])
def test_any_key_computes(locked: RunningService, key: str) -> None:
    body = {"hidden_states": hidden_states(1).tolist()}
    assert ask(locked, "POST", FORWARD, key, json=body).status_code == 200


def test_an_ordinary_key_changes_nothing(locked: RunningService) -> None:
    load = {"lora_name": "a", "lora_path": "good"}
    unsent = ask(locked, "POST", "/v1/load_lora_adapter", None, json=load)
    assert_refused(unsent, 401)
    assert unsent.json()["error"]["message"].endswith(": none came")
    unknown = ask(locked, "POST", "/v1/load_lora_adapter", "wrong", json=load)
    assert_refused(unknown, 401)
    assert unknown.json()["error"]["message"].endswith(": what came is none")
    assert_refused(ask(locked, "POST", "/v1/load_lora_adapter", USER, json=load), 403)
    assert_refused(ask(locked, "PUT", "/v1/adapters/a", USER, json={"path": "good"}), 403)
    assert ask(locked, "POST", "/v1/load_lora_adapter", ADMIN, json=load).status_code == 200
    assert_refused(ask(locked, "DELETE", "/v1/adapters/a", USER), 403)
    assert_refused(ask(locked, "POST", "/v1/unload_lora_adapter", USER, json={"lora_name": "a"}), 403)
    assert ask(locked, "GET", "/v1/adapters", USER).json()["adapters"][0]["name"] == "a"
    assert ask(locked, "DELETE", "/v1/adapters/a", ADMIN).status_code == 200


@pytest.mark.parametrize("path", ["/v2/repository/models/a/load", "/v2", "/v2/nothing", "/v2/models/layers.1/infer"])
def test_under_v2_the_error_is_the_protocol_s(locked: RunningService, path: str) -> None:
    answer = ask(locked, "POST", path)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert isinstance(answer.json()["error"], str)
    assert answer.json().keys() == {"error"}
    if "repository" in path:
        answer = ask(locked, "POST", path, USER)
        assert (answer.status_code, answer.json().keys()) == (403, {"error"})


@pytest.mark.parametrize(
    ("api", "admin", "expected"),
    [
        ([], None, {"metrics": (200, 200, 200), "load": (404, 404, 404)}),
        ([USER], None, {"metrics": (401, 200, 401), "load": (401, 404, 401)}),
        ([], ADMIN, {"metrics": (200, 200, 200), "load": (401, 401, 404)}),
        ([USER], ADMIN, {"metrics": (401, 200, 200), "load": (401, 403, 404)}),
    ],
)
def test_which_keys_there_are_decides(
    open_engine: OpenEngine, adapter_root: Path, api: list[str], admin: str | None, expected: dict[str, tuple[int, ...]]
) -> None:
    with running(open_engine, adapter_root, keys=Keys(api, admin)) as service:
        load = {"lora_name": "a", "lora_path": "absent"}
        for what, statuses in expected.items():
            for key, status in zip((None, USER, ADMIN), statuses, strict=True):
                path, options = ("/v1/load_lora_adapter", {"json": load}) if what == "load" else ("/metrics", {})
                answer = ask(service, "POST" if what == "load" else "GET", path, key, **options)
                assert answer.status_code == status, (what, key)
        for path in ("/health", "/ready"):
            assert ask(service, "GET", path).status_code == 200
        assert ask(service, "POST", FORWARD, None, json={}).status_code == (401 if api else 400)


@pytest.mark.parametrize(
    "target",
    [
        "//health",
        "/health/",
        "/health/.",
        "/health/..",
        "/health/../metrics",
        "/health/..%2fmetrics",
        "/health;x",
        "/health%00",
        "/%68ealth",
        "/Health",
        "/HEALTH",
        "/./health",
        "/metrics/../health",
        "/metrics",
        "//metrics",
        "/%6detrics",
        "/metrics?/health",
        "/metrics#/health",
        "/v1/models;/health",
        "/v2/health/live/../../../metrics",
        "/v2/health/..%2f..%2fmetrics",
        "/v2/health/other",
        "/v2/health",
        "http://x/metrics",
        "http://x/health/",
        "http://health/metrics",
        "/docs",
        "/openapi.json",
        "/nothing",
        "/",
    ],
)
def test_no_spelling_opens_anything_else(locked: RunningService, target: str) -> None:
    """Whatever the client calls itself, and however it writes what it asks for."""
    for host in ("x", "x/health?", "x/health#", "/health", "x:80/health"):
        sent = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nX-Original-URL: /health\r\nX-Forwarded-Prefix: /health\r\n"
        [(status, headers, _)] = answers(spoken(locked, iter([sent.encode() + b"Connection: close\r\n\r\n"])))
        assert (status, headers.get("www-authenticate")) in ((401, "Bearer"), (400, None)), (target, host)


@pytest.mark.parametrize("target", ["/health", "/health?x=1", "/ready?/metrics", "http://elsewhere/health", "/ready#x"])
def test_probes_are_open(locked: RunningService, target: str) -> None:
    sent = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    [(status, _, body)] = answers(spoken(locked, iter([sent])))
    assert (status, json.loads(body)) == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/%6coad_lora_adapter"),
        ("POST", "/v1/load_lora_adapter/"),
        ("POST", "//v1/load_lora_adapter"),
        ("PUT", "/v1/%61dapters/a"),
        ("DELETE", "/v1/adapters%2fa"),
        ("DELETE", "/v1/layers/../adapters/a"),
        ("POST", "/v2/models/../repository/models/a/load"),
        ("POST", "/v2/repository/models/layers.1/infer/load"),
        ("PATCH", "/v1/adapters/a"),
        ("POST", "/v1/something_new"),
    ],
)
def test_no_spelling_of_a_change_is_open_to_an_ordinary_key(locked: RunningService, method: str, target: str) -> None:
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\nContent-Length: 0\r\n"
    [(status, *_)] = answers(spoken(locked, iter([head.encode() + b"Connection: close\r\n\r\n"])))
    assert status in (403, 404)
    if "models/.." not in target and "layers/.." not in target:
        assert status == 403


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (f"Authorization: Bearer {USER}", 200),
        (f"authorization: bearer {USER}", 200),
        (f"AUTHORIZATION: BEARER   {USER}  ", 200),
        (f"Authorization: Bearer {USER.upper()}", 401),
        (f"Authorization: Bearer {USER[:-1]}", 401),
        (f"Authorization: Bearer {USER}x", 401),
        (f"Authorization: Bearer {USER},{ADMIN}", 401),
        (f"Authorization: Bearer\t{USER}", 401),
        (f"Authorization: {USER}", 401),
        (f"Authorization: Basic {USER}", 401),
        ("Authorization: Bearer ", 401),
        ("Authorization: Bearer", 401),
        ("Authorization:", 401),
        ("Authorization: Bearer " + "x" * 10_000, 401),
        ("Authorization: Bearer \u00fcser-key", 401),
        (f"X-Api-Key: {USER}", 401),
        (f"Cookie: Authorization={USER}", 401),
        (f"Authorization: Bearer wrong\r\nAuthorization: Bearer {USER}", 401),
        (f"Authorization: Bearer {USER}\r\nAuthorization: Bearer {USER}", 401),
    ],
)
def test_ways_of_sending_a_key(locked: RunningService, lines: str, status: int) -> None:
    sent = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{lines}\r\nConnection: close\r\n\r\n".encode("latin-1")
    assert [said for said, *_ in answers(spoken(locked, iter([sent])))] == [status]


def test_a_key_behind_the_body_is_no_key(locked: RunningService) -> None:
    head = f"POST {FORWARD} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    trailer = f"0\r\nAuthorization: Bearer {USER}\r\n\r\n"
    assert [said for said, *_ in answers(spoken(locked, iter([(head + trailer).encode()])))] == [401]


def test_a_refused_body_is_not_taken_for_a_request(locked: RunningService) -> None:
    inner = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\n\r\n".encode()
    head = f"POST {FORWARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    last = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert [said for said, *_ in answers(spoken(locked, iter([head, inner + last])))] == [401, 200]


def test_only_digests_are_kept() -> None:
    keys = Keys([USER], ADMIN)
    assert USER not in repr(vars(keys))
    assert ADMIN not in repr(vars(keys))
    assert not Keys()
    assert Keys([], ADMIN).needed("GET", b"/metrics") is Right.NONE
