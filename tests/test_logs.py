"""The log: one line an event whatever happens, JSON where it was asked for, and a line of each request."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moelet.service.logs import JsonFormatter, TextFormatter
from raw_http import answers, spoken
from running_service import RunningService, hidden_states
from served_process import SOURCES

EVENTS = """
import asyncio, logging, sys, threading, warnings
from moelet.service.logs import configure_logs
configure_logs(sys.argv[1], "debug")
log = logging.getLogger("moelet.test")
log.info("two\\nlines \\x1b[31m and \\ud800")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("caught")
warnings.warn("a warning\\nof two lines")
logging.getLogger("uvicorn.error").warning("uvicorn speaks")
thread = threading.Thread(target=lambda: [][0], name="worker")
thread.start()
thread.join()
class Broken:
    def __del__(self):
        raise KeyError("in del")
Broken()
async def fail():
    asyncio.get_running_loop().call_soon(lambda: [][1])
    await asyncio.sleep(0.01)
asyncio.run(fail())
raise ValueError("nobody\\ncaught this")
"""


@pytest.fixture(scope="module", params=["json", "text"])
def lines(request: pytest.FixtureRequest) -> list[str]:
    """What a process that everything happens to writes to stderr."""
    environment = os.environ | {"PYTHONPATH": SOURCES}
    command = [sys.executable, "-c", EVENTS, request.param]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, errors="strict")
    assert (ran.returncode, ran.stdout) == (1, "")
    return [request.param, *ran.stderr.splitlines()]


def test_everything_that_happens_is_logged_and_json_is_one_object_a_line(lines: list[str]) -> None:
    log_format, *lines = lines
    text = "\n".join(lines)
    told = ("uvicorn speaks", "a warning", "IndexError", "KeyError", "in del", "caught this", "ZeroDivisionError")
    assert all(part in text for part in told)
    assert "\x1b" not in text
    if log_format == "text":
        assert sum(" moelet.test: two\\nlines" in line for line in lines) == 1
        return
    entries = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    loggers = {"moelet.test", "uvicorn.error", "py.warnings", "asyncio", "moelet.service.logs"}
    assert {entry["logger"] for entry in entries} == loggers
    critical = [entry for entry in entries if entry["level"] == "critical"]
    assert [entry["exception"].splitlines()[-1] for entry in critical] == [
        "IndexError: list index out of range",
        "KeyError: 'in del'",
        "caught this",
    ]


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The records of requests."""
    with caplog.at_level(logging.DEBUG, "moelet.access"):
        yield caplog


def requests(access: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """The records of ``count`` requests, which are made just after their answers."""
    deadline = time.monotonic() + 10
    while True:
        records = [record for record in access.records if record.name == "moelet.access"]
        if len(records) >= count or time.monotonic() > deadline:
            assert len(records) == count
            return records
        time.sleep(0.01)


def fields(access: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in requests(access, count)]


def test_each_request_is_a_line(running_service: RunningService, access: pytest.LogCaptureFixture) -> None:
    running_service.output(hidden_states=hidden_states(3))
    running_service.client.get("/nothing")
    running_service.forward(9, hidden_states=[])
    forward, other, wrong = fields(access, 3)
    what = ("method", "path", "status", "layer", "tokens", "level", "logger")
    assert [forward[name] for name in what] == ["POST", "/v1/layers/1/forward", 200, "1", 3, "debug", "moelet.access"]
    assert 0 < forward["ms"] < 60_000
    assert (other["status"], other["path"], "layer" in other) == (404, "/nothing", False)
    assert (wrong["status"], wrong["layer"], wrong["tokens"]) == (404, "none", 0)
    text = [TextFormatter().format(record) for record in requests(access, 3)]
    assert "POST /v1/layers/1/forward 200 in " in text[0]
    assert text[0].endswith(", layer 1, 3 tokens")


def test_a_request_behind_a_forward_is_not_taken_for_one(
    running_service: RunningService, access: pytest.LogCaptureFixture
) -> None:
    """Both in one piece on one connection, where the second begins in what the first left."""
    body = json.dumps({"hidden_states": hidden_states(2).tolist()}).encode()
    sent = b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    sent += b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert [status for status, *_ in answers(spoken(running_service, iter([sent])))] == [200, 200]
    assert [(entry["path"], entry.get("layer")) for entry in fields(access, 2)] == [
        ("/v1/layers/1/forward", "1"),
        ("/ready", None),
    ]


def test_nobody_writes_lines_into_the_log(running_service: RunningService, access: pytest.LogCaptureFixture) -> None:
    path = "/%0d%0a2026-01-01T00:00:00Z%20INFO%20moelet:%20all%20is%20well%1b[2J%e2%80%a8%c2%85%00" + "x" * 5000
    assert running_service.client.get(path).status_code == 404
    [entry] = fields(access, 1)
    assert len(entry["path"]) < 250
    [record] = requests(access, 1)
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record)
        assert len(line.splitlines()) == 1
        assert not any(ord(character) < 32 for character in line)
