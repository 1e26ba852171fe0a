"""The path policy: adapters named by clients are read below the adapter roots and nowhere else."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..layer.errors import AdapterForbiddenError, AdapterNotFoundError, ConfigurationError, RequestError


class AdapterRoots:
    """The folders given as ``--adapter-root``, links resolved once, at start."""

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not _is_folder(root):
                raise ConfigurationError(f"--adapter-root {root} is not a folder: create it or name another")
        self.roots = tuple(dict.fromkeys(_real(root) for root in roots))

    def check_enabled(self) -> None:
        """Raise ``AdapterForbiddenError`` when there is no root: clients may then load nothing."""
        if not self.roots:
            raise AdapterForbiddenError("loading adapters at run time is off: the service has no --adapter-root")

    def resolve(self, sent: str, param: str) -> Path:
        """The folder that a client means, all links resolved; a relative path is taken below each root in turn.

        Raises ``AdapterForbiddenError`` for what lies outside every root, in the same words whether or
        not it exists, or when an adapter file in it is a link that leads outside; ``AdapterNotFoundError``
        when it would lie inside and is not there; ``RequestError`` for what cannot be a path.
        """
        self.check_enabled()
        if not sent or "\0" in sent:
            raise RequestError(f"{param} should be the path of an adapter's folder, got {sent!r}", param)
        try:
            candidates = dict.fromkeys(_real(root / sent) for root in self.roots)
        except UnicodeEncodeError:
            raise RequestError(f"{param} is not a path: it has characters that no file name has", param) from None
        inside = [path for path in candidates if self._holds(path)]
        if not inside:
            raise AdapterForbiddenError(f"{sent} lies outside every adapter root of this service")
        folder = next((path for path in inside if _is_folder(path)), None)
        if folder is None:
            raise AdapterNotFoundError(f"no adapter found at {sent}: there is no such folder")
        self._check_links(folder, sent)
        return folder

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.roots)

    def _check_links(self, folder: Path, sent: str) -> None:
        for entry in folder.glob("adapter_*"):
            if not self._holds(_real(entry)):
                raise AdapterForbiddenError(f"{entry.name} in {sent} is a link that leads out of the adapter roots")


def _is_folder(path: Path) -> bool:
    """``Path.is_dir``, but a name too long for the file system, or hidden from us, is no folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _real(path: Path) -> Path:
    """All links resolved, as far as the path exists; unlike ``Path.resolve`` a loop of links does not raise."""
    return Path(os.path.realpath(path))
