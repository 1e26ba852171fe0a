"""The safetensors files of one folder, as one table of tensors that are read only when asked for."""

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointNotFoundError, UnsupportedCheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape and dtype of a tensor on disk; ``dtype`` as safetensors spells it (``"BF16"``)."""

    dtype: str
    shape: tuple[int, ...]


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. Raises ``CheckpointNotFoundError`` where that may not be looked at."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file. Raises ``CheckpointNotFoundError`` where that may not be looked at."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """What is at ``path``, 0 for nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointNotFoundError(f"{path} cannot be looked at: {reason}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``CheckpointNotFoundError`` or ``UnsupportedCheckpointError``."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedCheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedCheckpointError(f"{path} should hold a JSON object, found a {type(content).__name__}")
    return content


class Shards:
    """The tensors of a folder with ``model.safetensors``, or shards and their index.

    Files are memory-mapped when a tensor in them is asked for, so that shards of layers that are
    not served need not be there. Raises ``CheckpointNotFoundError`` if a file is
    not there and ``UnsupportedCheckpointError`` if it is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = self._single() if is_file(folder / SINGLE) else self._indexed()

    @property
    def keys(self) -> Iterable[str]:
        """Every tensor key, in no particular order."""
        return self._file_of.keys()

    def describe(self, keys: Iterable[str]) -> dict[str, StoredTensor]:
        """Shapes and dtypes of ``keys``, from the files' headers alone."""
        table = {}
        with self.reader() as reader:
            for key in keys:
                piece = reader.stored(key)
                table[key] = StoredTensor(piece.get_dtype(), tuple(piece.get_shape()))
        return table

    @contextmanager
    def reader(self) -> Iterator["Reader"]:
        """A reader whose files stay mapped until the end of the ``with`` block."""
        with ExitStack() as stack:
            yield Reader(self._folder, self._file_of, stack)

    def _single(self) -> dict[str, str]:
        with ExitStack() as stack:
            return dict.fromkeys(_open(self._folder / SINGLE, stack).keys(), SINGLE)

    def _indexed(self) -> dict[str, str]:
        if not is_file(self._folder / INDEX):
            raise _no_weights(self._folder)
        weight_map = read_json(self._folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnsupportedCheckpointError(f"{self._folder / INDEX} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or PurePath(name).name != name:
                raise UnsupportedCheckpointError(f"{self._folder / INDEX} names {name!r}, expected a file beside it")
        return weight_map


class Reader:
    """Reads tensors of a set of mapped files; made by ``Shards.reader``."""

    def __init__(self, folder: Path, file_of: Mapping[str, str], stack: ExitStack) -> None:
        self._folder = folder
        self._file_of = file_of
        self._stack = stack
        self._open: dict[str, Any] = {}

    def stored(self, key: str) -> Any:
        """The safetensors slice object of ``key``: nothing is read until it is indexed."""
        name = self._file_of[key]
        if name not in self._open:
            self._open[name] = _open(self._folder / name, self._stack)
        try:
            return self._open[name].get_slice(key)
        except SafetensorError as error:
            raise UnsupportedCheckpointError(f"{self._folder / name} has no tensor {key}") from error

    def read(self, key: str, rows: slice) -> Tensor:
        """``tensor[rows]`` of ``key``, still in the mapped file where that is possible."""
        tensor: Tensor = self.stored(key)[rows]
        return tensor


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path} is not there") from error
    except SafetensorError as error:
        if not _is_utf8(path):
            raise UnsupportedCheckpointError(f"{path} cannot be read, as its name is not UTF-8: rename it") from error
        raise _broken(path, error) from error
    except (OSError, ValueError) as error:
        raise _broken(path, error) from error


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _broken(path: Path, error: Exception) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(f"{path} is not a whole safetensors file ({error}): copy or download it again")


def _no_weights(folder: Path) -> Exception:
    if pickles := sorted(folder.glob("*.bin")):
        return UnsupportedCheckpointError(
            f"{folder} holds {pickles[0].name} but no safetensors, and pickles are not read: convert it once with "
            "transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    for name in (SINGLE, INDEX):
        if (folder / name).is_symlink() or (folder / name).exists():
            return CheckpointNotFoundError(f"{folder / name} is no file, or a link to a file that is not there")
    if shards := sorted(folder.glob("*.safetensors")):
        return CheckpointNotFoundError(f"{folder} holds {shards[0].name} but neither {SINGLE} nor {INDEX}")
    return CheckpointNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")
