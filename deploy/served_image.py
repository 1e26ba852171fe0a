"""A container of the image that serves, and HTTP to it from outside through its own network namespace."""

import ctypes
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_store import ImageError, Store

PORT = 8000
START_S = 120
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
HARDENED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges")
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1000:1000", "--network", "none")
"""No network but loopback of its own; the limits are low because raising them may need a right we do not have."""


@dataclass(frozen=True)
class Reply:
    """What came back: the status, and the body as text."""

    status: int
    text: str

    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.text)


class Served:
    """One running container, spoken to by sockets that are opened inside its network namespace."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.pid = int(self.state("Pid"))
        self._network = ThreadPoolExecutor(1, initializer=enter_network, initargs=(self.pid,))

    def state(self, field: str) -> str:
        """A field of podman's record of the container's state, as text."""
        return self.store.run("podman", "inspect", "--format", f"{{{{.State.{field}}}}}", self.name).stdout.strip()

    def execute(self, *command: str) -> tuple[int, str]:
        """Run a command inside as the container's own user: its exit code and what it said."""
        done = self.store.run("podman", "exec", self.name, *command, check=False)
        return done.returncode, (done.stdout + done.stderr).strip()

    def logs(self) -> str:
        """Everything that was logged so far."""
        done = self.store.run("podman", "logs", self.name)
        return done.stdout + done.stderr

    def call(self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60) -> Reply:
        """One HTTP request on a connection of its own. Raises ``OSError`` where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout_s)
        connection.sock = self._network.submit(socket.create_connection, ("127.0.0.1", PORT), timeout_s).result()
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read().decode())
        finally:
            connection.close()

    def close(self) -> None:
        """Leave the container's network."""
        self._network.shutdown()

    def wait_until_ready(self) -> None:
        """Wait for ``/ready``. Raises ``ImageError`` when the container ends first, or within two minutes is not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if self.call("GET", "/ready").status == 200:
                    return
            except OSError:
                pass
            if self.state("Running") != "true":
                break
            time.sleep(0.2)
        raise ImageError(f"{self.name} did not become ready: {' '.join(self.logs().split())[-800:]}")

    def signal(self, name: str) -> None:
        """Send a signal to the container's first process."""
        self.store.run("podman", "kill", "--signal", name, self.name)

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end. Raises ``ImageError`` if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while self.state("Running") == "true":
            if time.monotonic() > deadline:
                raise ImageError(f"{self.name} still ran {timeout_s:g} s after the signal")
            time.sleep(0.1)
        return int(self.state("ExitCode"))


def enter_network(pid: int) -> None:
    """Move the calling thread, and so the sockets it opens, into the network namespace of ``pid``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def served(store: Store, image: str, options: Sequence[str], arguments: Sequence[str]) -> Iterator[Served]:
    """A container of ``image`` with a read-only root and no rights, ready to answer; gone afterwards."""
    name = f"moelet-check-{os.getpid()}"
    store.run("podman", "run", "--detach", "--name", name, *HARDENED, *LIMITS, *options, image, *arguments)
    try:
        container = Served(store, name)
        container.wait_until_ready()
        yield container
        container.close()
    finally:
        store.run("podman", "rm", "--force", "--time", "1", name, check=False)
