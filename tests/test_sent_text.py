"""Text from unknown hands in answers and logs: always UTF-8, never endless, one line each."""

import json
import logging

import pytest

from moelet.service.errors import error_body
from moelet.service.logs import JsonFormatter, TextFormatter
from moelet.service.sent_text import LONGEST, on_one_line, told


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("moelet", logging.INFO, "file", 1, "asked for %s", (message,), None)


@pytest.mark.parametrize("text", ["plain", "ünï", "adapter_\udcff", "\ud800"])
def test_an_error_carries_any_text(text: str) -> None:
    error = json.loads(error_body(400, f"no {text}", text, path="/"))["error"]
    escaped = text.encode("utf-8", "backslashreplace").decode()
    assert (error["message"], error["param"]) == (f"no {escaped}", escaped)


def test_a_long_message_keeps_its_ends() -> None:
    message = json.loads(error_body(404, "first " + "x" * 10**6 + " last", path="/"))["error"]["message"]
    assert len(message) < LONGEST + 10
    assert message.startswith("first x")
    assert message.endswith("x last")
    assert told("x" * LONGEST) == "x" * LONGEST


@pytest.mark.parametrize("text", ["a\n2026-01-01 ERROR forged", "a\r\x1b[2Jb", "a\u2028b", "a\x00b"])
def test_a_log_line_stays_one_line(text: str) -> None:
    line = TextFormatter().format(record(text))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert json.loads(JsonFormatter().format(record(text)))["message"] == f"asked for {text}"


def test_controls_are_escaped_and_the_rest_is_left() -> None:
    assert on_one_line("a\tü\x7f\x85\n") == r"a\tü\x7f\x85\n"


def test_a_json_line_carries_names_that_are_not_utf8() -> None:
    assert json.loads(JsonFormatter().format(record("b\udcff")))["message"] == r"asked for b\udcff"
