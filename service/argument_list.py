"""Takes keys out of the process list: what other users of the machine see of the command line."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ARG_START = 45
"""Place of ``arg_start`` in ``/proc/self/stat``, counted after the name in brackets; ``arg_end`` follows."""


def hide(secrets: Collection[str]) -> None:
    """Overwrite each of ``secrets`` among this process's arguments, as far as the system lets us (Linux)."""
    if not secrets:
        return
    with suppress(OSError, ValueError, IndexError):  # no such /proc here, or a sealed one: the environment is the way
        places = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(places[ARG_START]), int(places[ARG_START + 1])
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            memory.seek(start)
            memory.write(masked(arguments, secrets))


def masked(arguments: bytes, secrets: Collection[str]) -> bytes:
    """``arguments``, separated by NUL, with each that is a secret, or ends in ``=`` and one, made of as many stars."""
    parts = arguments.split(b"\0")
    for secret in (secret.encode() for secret in secrets):
        stars = b"*" * len(secret)
        for i, part in enumerate(parts):
            if part == secret:
                parts[i] = stars
            elif part.startswith(b"--") and part.endswith(b"=" + secret):
                parts[i] = part[: -len(secret)] + stars
    return b"\0".join(parts)
