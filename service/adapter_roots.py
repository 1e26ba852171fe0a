"""The path policy: adapters named by clients are read below the adapter roots and nowhere else."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..layer.adapter_files import unreadable
from ..layer.errors import AdapterForbiddenError, AdapterNotFoundError, ConfigurationError, RequestError

LONGEST_PATH = 1 << 15
"""Bytes of a path that a client may send, many times what any file system takes. The time to follow one grows with the
square of its length: of one that fills a body it would be hours."""

MOST_PASSES = 40
"""Over a path whose links lead through loops, as many as the kernel follows links."""


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

    def check(self, sent: str, param: str) -> None:
        """Raise ``AdapterForbiddenError`` when there is no root, and ``RequestError`` for what cannot be a path."""
        self.check_enabled()
        if not sent or "\0" in sent:
            raise RequestError(f"{param} should be the path of an adapter's folder, got {sent!r}", param)
        try:
            length = len(os.fsencode(sent))
        except UnicodeEncodeError:
            raise RequestError(f"{param} is not a path: it has characters that no file name has", param) from None
        if length > LONGEST_PATH:
            raise RequestError(f"{param} should be a path of at most {LONGEST_PATH} bytes, got {length}", param)

    def resolve(self, sent: str, param: str) -> tuple[Path, Path]:
        """The folder that a client means, all links resolved, and the root that holds it; a relative path
        is taken below each root in turn.

        Raises ``AdapterForbiddenError`` for what lies outside every root, in the same words whether or
        not it exists, or when an adapter file in it is a link that leads outside; ``AdapterNotFoundError``
        when it would lie inside and is not there; ``AdapterRefusedError`` when it changes meanwhile;
        ``RequestError`` for what cannot be a path; ``OSError`` where no file can be opened any more.
        """
        self.check(sent, param)
        try:
            return self._resolve(sent)
        except OSError as error:  # links and folders may change while they are followed
            raise unreadable(sent, "a folder that can be read", error) from None

    def _resolve(self, sent: str) -> tuple[Path, Path]:
        candidates = dict.fromkeys(_real(root / sent) for root in self.roots)
        inside = [(path, root) for path in candidates if (root := self._holder(path)) is not None]
        if not inside:
            raise AdapterForbiddenError(f"{sent} lies outside every adapter root of this service")
        found = next(((path, root) for path, root in inside if _is_folder(path)), None)
        if found is None:
            raise AdapterNotFoundError(f"no adapter found at {sent}: there is no such folder")
        _check_resolved(*found)
        _check_links(*found, sent)
        return found

    def _holder(self, path: Path) -> Path | None:
        return next((root for root in self.roots if path.is_relative_to(root)), None)


def _check_resolved(folder: Path, root: Path) -> None:
    """Raise ``OSError`` where what is there by now leads through a link below the root: ``realpath`` of Python 3.13
    leaves a link that it cannot read as it is."""
    way = [folder, *folder.parents]
    if any(place.is_symlink() for place in way[: way.index(root)]):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _check_links(folder: Path, root: Path, sent: str) -> None:
    links: list[Path] = []
    with suppress(PermissionError), os.scandir(folder) as entries:
        links += [Path(entry) for entry in entries if entry.name.startswith("adapter_") and entry.is_symlink()]
    for entry in links:
        if not _real(entry).is_relative_to(root):
            raise AdapterForbiddenError(f"{entry.name} in {sent} is a link that leads out of its adapter root")


def _is_folder(path: Path) -> bool:
    """``Path.is_dir``, but a name too long for the file system, or hidden from us, is no folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _real(path: Path) -> Path:
    """All links resolved, as far as the path exists; unlike ``Path.resolve`` a loop of links does not raise.

    Behind a loop ``realpath`` leaves links as they are, so it is asked again until nothing changes: what is
    checked is then what would be opened. Raises ``OSError`` when that does not end.
    """
    if (known := _real_by_kernel(path)) is not None:
        return known
    before, real = "", os.fspath(path)
    for _ in range(MOST_PASSES):
        before, real = real, os.path.realpath(real)
        if before == real:
            return Path(real)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _real_by_kernel(path: Path) -> Path | None:
    """What the kernel says that ``path`` leads to, in a tenth of the time; None where it leads to nothing."""
    if not hasattr(os, "O_PATH"):
        return None
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = Path(f"/proc/self/fd/{file}").readlink()
        same = os.path.samestat(os.fstat(file), found.lstat())  # else it was moved, or is hidden from us
    except OSError:
        return None
    finally:
        os.close(file)
    return found if same else None
