"""A ``moelet serve`` process of a benchmark's own, on a loopback port, and what can be read of it from outside."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .report import ROOT

START_S = 600.0
END_S = 60.0


class Served:
    """A serving process and its port."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process = process
        self.port = port

    @property
    def rss_mb(self) -> float:
        """Resident memory of the process, in 2^20 bytes."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    @property
    def open_files(self) -> int:
        """File descriptors of the process."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def end(self) -> int:
        """Have the process drain and end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """``moelet serve`` with ``options``, once it answers; its log goes to ``folder``. Killed at the end if it lives."""
    log = folder / "log"
    command = [sys.executable, "-m", "moelet", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with log.open("wb") as errors, subprocess.Popen(command, env=environment, stderr=errors) as process:
        try:
            yield Served(process, _port(process, log, command))
        finally:
            process.kill()


def _port(process: "subprocess.Popen[bytes]", log: Path, command: Sequence[str]) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving on http://[\d.]+:(\d+)", log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"{' '.join(command)} did not serve:\n{log.read_text(errors='replace')[-2000:]}")
