"""An adapter's folder on disk: its two files, opened without following a link out of it."""

import errno
import os
import stat
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

from .adapter_tensors import WEIGHTS, TensorFile
from .errors import AdapterNotFoundError, AdapterRefusedError

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 64 << 20

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class AdapterFolder:
    """``adapter_config.json`` and ``adapter_model.safetensors`` of the folder ``path``.

    Links in ``path`` itself are followed. The two files may be links only to places below ``root``,
    by default the folder. Raises ``AdapterNotFoundError`` unless ``path`` is a folder.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        if not os.path.isdir(path):  # noqa: PTH112  (unlike Path.is_dir it is False, not an error, for what is no path)
            raise AdapterNotFoundError(f"no adapter found at {path}: there is no such folder")
        self._path = path
        self._real = Path(os.path.realpath(path))
        self._root = self._real if root is None else Path(os.path.realpath(root))

    def read_config(self) -> bytes:
        """The bytes of ``adapter_config.json``.

        Raises ``AdapterNotFoundError`` where there is none, ``AdapterRefusedError`` where it cannot be read.
        """
        try:
            file = self._open(CONFIG)
        except FileNotFoundError:
            raise AdapterNotFoundError(f"no adapter found at {self._path}: it has no {CONFIG}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_CONFIG_BYTES:
                raise AdapterRefusedError(CONFIG, f"at most {MAX_CONFIG_BYTES} bytes", f"{size}")
            return file.readall()

    def open_weights(self) -> AbstractContextManager[TensorFile]:
        """``adapter_model.safetensors``, its header read and checked. Raises ``AdapterRefusedError``."""
        try:
            return TensorFile(self._open(WEIGHTS))
        except FileNotFoundError:
            raise AdapterRefusedError(WEIGHTS, "a safetensors file", self._without_weights()) from None

    def _open(self, name: str) -> FileIO:
        real = Path(os.path.realpath(self._real / name))
        if not real.is_relative_to(self._root):
            raise AdapterRefusedError(name, "a file inside the adapter's folder", "a link that leads out of it")
        if real == self._root:
            raise AdapterRefusedError(name, "a file", "a folder, pipe or device")
        try:
            descriptor = _open_below(self._root, real)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise unreadable(name, "a file that can be read", error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise AdapterRefusedError(name, "a file", "a folder, pipe or device")
        return FileIO(descriptor)

    def _without_weights(self) -> str:
        pickles = sorted(path.name for pattern in _PICKLES for path in self._real.glob(pattern))
        if not pickles:
            return "no such file"
        return (
            f"only {pickles[0]}, a pickle, which is never read: convert it once, in its folder, with "
            f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), {WEIGHTS!r})"
        )


def unreadable(what: str, wanted: str, error: OSError) -> AdapterRefusedError | OSError:
    """What to raise where ``error`` came of reading ``what``, which should be ``wanted``: ``error`` itself where the
    process or the host may open no file more, which is not the adapter's fault."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return error
    return AdapterRefusedError(what, wanted, error.strerror or "an I/O error")


def _open_below(root: Path, path: Path) -> int:
    """A descriptor of the file at ``path``, which has no links in it below ``root``: each step is taken from the folder
    that the one before it opened, so that nobody can put a link there meanwhile."""
    step = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    *folders, name = path.relative_to(root).parts
    folder = os.open(root, step)
    try:
        for part in folders:
            inner = os.open(part, step, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Not blocking: a named pipe would otherwise wait for its writer.
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
