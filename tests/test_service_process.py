"""``moelet serve`` as a process: answers, drains on a signal, and ends with the right code."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from moelet.service.client import Client
from served_process import process, served, wait_for_line

ZEROS = {"hidden_states": [[0.0] * 64] * 3}

SLOW_FORWARD = """
import time
from moelet.layer.reference import ReferenceEngine
forward = ReferenceEngine.forward
def slow(self, batch):
    print("forward begins", flush=True)
    time.sleep({seconds})
    return forward(self, batch)
ReferenceEngine.forward = slow
"""

FAILING_FORWARD = """
import time
from moelet.layer.errors import EngineFailedError
from moelet.layer.reference import ReferenceEngine
def fail(self, batch):
    time.sleep(1)
    raise EngineFailedError("the device fell off the bus")
ReferenceEngine.forward = fail
"""

SHORT_GRACE = """
from moelet.service.server import Server
Server.client_grace_s = 0.5
"""


def listens(uds: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(uds)) == 0


def forward(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/layers/0/forward", json=ZEROS | fields)


def test_serves_drains_and_ends_with_0(tmp_path: Path) -> None:
    with served(tmp_path, before=SLOW_FORWARD.format(seconds=1.5)) as it, ThreadPoolExecutor() as pool:
        names = [record["name"] for record in it.client.get("/v1/adapters").json()["adapters"]]
        assert names == ["demo-a", "demo-b"]
        models = it.client.get("/v1/models").json()["data"]
        assert models[0]["id"] == "moelet-demo"
        again = it.client.put("/v1/adapters/demo-a", json={"path": "moelet-demo/demo-a"})
        assert (again.status_code, again.json()["version"]) == (200, 2)
        running = pool.submit(forward, it.client, adapter="demo-b")
        wait_for_line(it.process, "forward begins")
        it.process.send_signal(signal.SIGTERM)
        while it.client.get("/ready").status_code == 200:
            time.sleep(0.01)
        refused = forward(it.client)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert it.client.get("/health").json() == {"status": "draining"}
        assert running.result().status_code == 200
        assert it.wait() == 0
        assert "Traceback" not in it.log.read_text()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path, before=SLOW_FORWARD.format(seconds=60)) as it, ThreadPoolExecutor() as pool:
        running = pool.submit(forward, it.client)
        wait_for_line(it.process, "forward begins")
        it.process.send_signal(signal.SIGINT)
        while it.client.get("/ready").status_code == 200:
            time.sleep(0.01)
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(20) == 128 + signal.SIGTERM
        with pytest.raises(httpx.HTTPError):
            running.result()


@pytest.mark.parametrize("tokens", [0, 20_000])
def test_clients_that_neither_send_nor_read_do_not_hold_the_process(tmp_path: Path, tokens: int) -> None:
    """Half a body is sent, or a whole one whose answer, larger than any socket's buffer, is not read."""
    body = b'{"hidden_states": [' + b",".join([b"[%s]" % b",".join([b"0.3"] * 64)] * tokens) + b"]}"
    length = len(body) + (0 if tokens else 1)
    head = f"POST /v1/layers/0/forward HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    with served(tmp_path, before=SHORT_GRACE) as it:
        url = it.client.base_url
        with socket.create_connection((url.host, url.port)) as idle:
            idle.sendall(head + body)
            assert (idle.recv(1) if tokens else it.client.get("/ready").content) != b""
            it.process.send_signal(signal.SIGTERM)
            assert it.wait() == 0
    assert "Traceback" not in it.log.read_text()


def test_a_failed_engine_answers_all_that_it_had_with_503_and_ends_with_1(tmp_path: Path) -> None:
    """What runs, and what waits, some of it with adapters."""
    with served(tmp_path, before=FAILING_FORWARD) as it, ThreadPoolExecutor(12) as pool:
        failing = [pool.submit(forward, it.client, adapter=name) for name in (None, "demo-a", "demo-b") * 4]
        for failed in (each.result() for each in failing):
            assert failed.status_code == 503
            assert "fell off the bus" in failed.json()["error"]["message"]
        assert it.wait() == 1
        assert "fell off the bus" in it.log.read_text()


def test_unix_socket_and_json_log(tmp_path: Path) -> None:
    uds = tmp_path / "s"
    with served(tmp_path, "--log-format", "json", "--log-level", "debug", "--layers", "0,2", uds=uds) as it:
        answer = it.client.post("/v1/layers/0/forward", json=ZEROS, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 200
        assert answer.json()["num_tokens"] == 3
        with Client(f"unix:{uds}") as client:
            assert [layer["layer"] for layer in client.layers()] == [0, 2]
            assert client.forward(2, np.zeros((3, 64), np.float32)).shape == (3, 64)
        it.process.send_signal(signal.SIGINT)
        assert it.wait() == 0
        lines = [json.loads(line) for line in it.log.read_text().splitlines()]
        assert any(line.get("request_id") == "mine" and line["level"] == "debug" for line in lines)
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert not uds.exists()


def test_a_closed_stderr_is_no_reason_to_fail(tmp_path: Path) -> None:
    uds = tmp_path / "s"
    closed = "import os, sys\nos.close(2)\nsys.stderr = None"
    with process(tmp_path, tmp_path / "log", before=closed, uds=uds) as started:
        deadline = time.monotonic() + 60
        while not listens(uds):
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(uds))) as client:
            assert forward(client).status_code == 200
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) == 0


def test_keys_are_asked_for_and_told_to_nobody(tmp_path: Path) -> None:
    keys = ["--api-key", "secret-user", "--admin-api-key", "secret-admin"]
    with served(tmp_path, *keys, "--log-level", "debug", "--body-timeout-s", "1") as it:
        statuses = []
        for key in ("", "secret-user", "secret-admin", "secret-other"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            loaded = it.client.put("/v1/adapters/a", json={"path": "moelet-demo/demo-a"}, headers=headers)
            statuses.append((it.client.get("/metrics", headers=headers).status_code, loaded.status_code))
        assert statuses == [(401, 401), (200, 403), (200, 201), (401, 401)]
        with socket.create_connection((it.client.base_url.host, it.client.base_url.port), timeout=10) as idle:
            idle.sendall(b"GET /ready HTTP/1.1\r\nAuthorization: Bearer secret-user\r\n")
            assert idle.recv(1) == b""
        told = it.client.get("/metrics", headers={"Authorization": "Bearer secret-user"}).text
        assert 'moelet_connections_ended_total{reason="slow_request"} 1.0' in told
        assert 'moelet_http_responses_total{code="401"} 4.0' in told
        assert "moelet_connections 1.0" in told
        for pid in (it.process.pid, *it.readers()):
            assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        it.process.send_signal(signal.SIGTERM)
        assert it.wait() == 0
        assert "secret" not in it.log.read_text()
