"""``moelet serve --demo`` as a process for tests, and a client of it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

import moelet

SOURCES = str(Path(moelet.__file__).parent.parent)


@dataclass
class Served:
    """A serving process and where it listens."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: Path

    def wait(self) -> int:
        return self.process.wait(20)

    def readers(self) -> list[int]:
        """The processes that read adapters for it: the one that starts readers, and the reader."""
        found: list[int] = []
        parent = self.process.pid
        while listed := Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            [parent] = map(int, listed)
            found.append(parent)
        return found

    def report(self) -> None:
        """Have the processes report from here on what they do, where they were told how before they began."""
        for pid in (self.process.pid, *self.readers()):
            os.kill(pid, signal.SIGUSR1)
        assert self.client.get("/ready").status_code == 200

    def said(self) -> str:
        """End the process at once; what it wrote to stdout."""
        self.process.kill()
        assert self.process.stdout is not None
        return self.process.stdout.read()


@contextmanager
def process(
    tmp_path: Path, log: Path, *options: str, before: str = "", uds: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``moelet serve --demo`` after running ``before`` in the same process."""
    start = [sys.executable, "-m", "moelet"]
    if before:
        start = [sys.executable, "-c", f"{before}\nimport sys\nfrom moelet.service.cli import main\nsys.exit(main())"]
    where = ["--uds", str(uds)] if uds else ["--port", "0"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MOELET_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as errors:
        started = subprocess.Popen(
            [*start, "serve", "--demo", "--device", "cpu", *where, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@contextmanager
def served(tmp_path: Path, *options: str, before: str = "", uds: Path | None = None) -> Iterator[Served]:
    """The same once it serves."""
    log = tmp_path / "log"
    with process(tmp_path, log, *options, before=before, uds=uds) as started:
        url = wait_for(log, started)
        transport = httpx.HTTPTransport(uds=str(uds)) if uds else None
        with httpx.Client(base_url=url, transport=transport, timeout=30) as client:
            yield Served(started, client, log)


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    """Wait until ``process`` says ``line``, and nothing else before it."""
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def wait_for(log: Path, process: subprocess.Popen[str]) -> str:
    """The URL that the log says it serves on."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := re.search(r"serving on (http://[\d.]+:\d+|unix:)", log.read_text()):
            return found[1] if found[1] != "unix:" else "http://localhost"
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())
