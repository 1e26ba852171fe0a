"""The health check's program: what it says and how it ends, against services that answer and that do not."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from moelet.service.probe import main


class Answers(BaseHTTPRequestHandler):
    """200 for /health, 503 for everything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
        self.wfile.write(b"it drains")

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("MOELET_PORT", str(server.server_port))
        yield server.server_port
        server.shutdown()
        thread.join()


def test_200_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/health"]) == 0
    assert capsys.readouterr().err == ""


def test_the_case_of_the_variable_does_not_matter(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_PORT", "")
    monkeypatch.setenv("moelet_port", str(port))
    assert main(["/health"]) == 0


def test_any_other_status_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/ready"]) == 1
    assert capsys.readouterr().err == "/ready is answered with 503: it drains\n"


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    monkeypatch.setenv("MOELET_PORT", str(free))
    assert main(["/health"]) == 1
    assert "not answered" in capsys.readouterr().err


def test_silence_ends_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("moelet.service.probe.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MOELET_PORT", str(silent.getsockname()[1]))
        assert main(["/health"]) == 1
    assert "not answered" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["tcp://10.0.0.1:8000", "x", "-1", "٣"])
def test_a_port_that_is_none_is_told(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOELET_PORT", port)
    assert main(["/health"]) == 2
    assert "MOELET_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["health"], ["/health", "/ready"]])
def test_anything_else_is_told_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err
