"""Where a service is reached: an address bound before anything is loaded, open once it is ready, one process's own."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ..layer.errors import ConfigurationError
from .settings import Settings


@contextmanager
def bound(settings: Settings) -> Iterator[socket.socket]:
    """The address of ``settings``, bound and not yet listening, so that one in use is found before loading."""
    with held(settings.uds) if settings.uds else nullcontext():
        listener = bind_path(settings.uds) if settings.uds else bind_port(settings.host, settings.port)
        ours = file_at(settings.uds) if settings.uds else None
        try:
            yield listener
        finally:
            listener.close()
            if settings.uds and file_at(settings.uds) == ours:  # else somebody has put another there
                settings.uds.unlink(missing_ok=True)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The socket ``path`` for this process alone, by a lock on a file beside it: a socket on which nobody listens yet
    looks like one that was left behind. Raises ``ConfigurationError``."""
    beside = path.with_name(f"{path.name}.lock")
    try:
        file = locked(beside)
    except BlockingIOError:
        raise ConfigurationError(f"cannot listen on --uds {path}: another process does, or is about to") from None
    except OSError as error:
        raise ConfigurationError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    try:
        yield
    finally:
        beside.unlink(missing_ok=True)
        os.close(file)


def locked(path: Path) -> int:
    """A descriptor of the file ``path``, made and locked. Raises ``BlockingIOError`` where another process has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file)
            if file_at(path) == (found.st_dev, found.st_ino):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # who had it before has removed it meanwhile


def file_at(path: Path) -> tuple[int, int] | None:
    """What tells the file at ``path`` from those that were or will be there, or None for none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def bind_port(host: str, port: int) -> socket.socket:
    """A TCP socket bound to ``host`` and ``port``. Raises ``ConfigurationError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ConfigurationError(f"--host {host} is no address of this machine: {reason}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(f"--host {host} is no address of this machine: name one that is") from None
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error.strerror}; stop what uses it or pass another --port"
        ) from None
    return listener


def bind_path(path: Path) -> socket.socket:
    """A Unix socket bound to ``path``, in the place of one that nobody serves any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not is_served(path):
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return listener


def is_served(path: Path) -> bool:
    """Whether a process listens on the Unix socket at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
        probe.connect(str(path))
        return True
    return False


def listen(listener: socket.socket, backlog: int) -> None:
    """Open the port. Raises ``ConfigurationError`` when another process opened it meanwhile."""
    try:
        listener.listen(backlog)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address(listener)}: {error.strerror}") from None


def address(listener: socket.socket) -> str:
    """What a client connects to."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"
