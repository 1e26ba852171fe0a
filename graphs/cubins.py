"""Compiled kernels in files: the cache that fills itself, the folder that an image ships, and the file's format.

A file is the cubin itself, then the compiler's log, then a footer with a hash of it all.
"""

import hashlib
import logging
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_MAGIC = b"moeletC1"
_FOOTER = struct.Struct("<8sQQ32s")  # magic, image bytes, log bytes, sha256 of all that precedes the hash


class CubinStore:
    """Where cubins are kept: a read-only folder that an image ships, looked in first, and a cache that fills itself.

    Either may be None. A cache that cannot be written is given up with one line in the log.
    """

    def __init__(self, cache: Path | None, shipped: Path | None = None) -> None:
        self.cache = cache
        self.shipped = shipped

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "CubinStore":
        """``MOELET_CACHE_DIR`` (default ``~/.cache/moelet``) and ``MOELET_CUBIN_DIR`` (default none)."""
        shipped = environment.get("MOELET_CUBIN_DIR")
        try:
            cache = Path(environment.get("MOELET_CACHE_DIR") or "~/.cache/moelet").expanduser()
        except RuntimeError:
            logger.warning("cubins are not cached: there is no home folder, and MOELET_CACHE_DIR is not set")
            return cls(None, Path(shipped) if shipped else None)
        return cls(cache, Path(shipped) if shipped else None)

    def find(self, file_name: str) -> tuple[bytes, str, str] | None:
        """The image, log and origin kept under ``file_name``; None where nothing whole is."""
        for folder, origin in ((self.shipped, "shipped"), (self.cache, "cache")):
            if folder is None:
                continue
            try:
                data = (folder / file_name).read_bytes()
            except OSError:
                continue
            found = unpack(data)
            if found is not None:
                return (*found, origin)
            logger.warning("%s is damaged and is compiled anew", folder / file_name)
        return None

    def keep(self, file_name: str, image: bytes, log: str) -> None:
        """Put a cubin into the cache, whole or not at all."""
        if self.cache is None:
            return
        try:
            write_whole(self.cache / file_name, pack(image, log))
        except OSError as error:
            logger.warning("cubins are not cached: %s cannot be written (%s)", self.cache, error.strerror)
            self.cache = None


def pack(image: bytes, log: str) -> bytes:
    """The bytes of a cubin file."""
    text = log.encode()
    footer = _FOOTER.pack(_MAGIC, len(image), len(text), b"")
    body = image + text + footer[:-32]
    return body + hashlib.sha256(body).digest()


def unpack(data: bytes) -> tuple[bytes, str] | None:
    """The image and log of a cubin file; None if it is not one, or not whole."""
    if len(data) < _FOOTER.size:
        return None
    magic, image_size, log_size, digest = _FOOTER.unpack(data[-_FOOTER.size :])
    whole = magic == _MAGIC and image_size + log_size + _FOOTER.size == len(data)
    if not whole or hashlib.sha256(data[:-32]).digest() != digest:
        return None
    return data[:image_size], data[image_size : image_size + log_size].decode()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and its folder, so that a reader sees all of it or none. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
