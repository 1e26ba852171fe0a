"""The error tree of moelet; every error a caller may want to tell apart has a class here.

::

    MoeletError
    ├── ConfigurationError            an option, setting or environment is wrong
    │   └── DeviceUnavailableError    the asked-for device cannot be used
    ├── CheckpointError               a base checkpoint cannot be served
    │   ├── CheckpointNotFoundError   the folder or one of its files is not there
    │   └── UnsupportedCheckpointError  the family, format or shape is refused, by name
    ├── AdapterError
    │   ├── AdapterNotFoundError      no adapter folder, or no adapter_config.json in it
    │   ├── AdapterRefusedError       the adapter is there and is refused (key, expected, found)
    │   ├── AdapterForbiddenError     the path lies outside every adapter root
    │   ├── AdapterNotLoadedError     the name is not loaded
    │   ├── AdapterAlreadyLoadedError the name is loaded already
    │   ├── AdapterBusyError          requests in flight still hold it
    │   └── AdapterCapacityError      no place is left and nothing may be evicted
    ├── RequestError                  a forward call is malformed or contradicts itself
    │   └── LayerNotServedError       the layer is dense, left out, or does not exist
    └── EngineError                   the device failed
        └── EngineFailedError         it failed for good; the process must be restarted
"""

from typing import Any


class MoeletError(Exception):
    """Base of every error moelet raises on purpose; ``str(error)`` is one sentence for a person. All of them may be
    pickled and copied, whatever they are made of: they often come from another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[MoeletError], args: tuple[Any, ...]) -> MoeletError:
    """An error with ``args``, of which ``vars`` are set afterwards, by no ``__init__``."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigurationError(MoeletError):
    """An option, setting or environment variable is wrong; the message says what to do."""


class DeviceUnavailableError(ConfigurationError):
    """The asked-for device is absent or cannot run the kernels."""


class CheckpointError(MoeletError):
    """A base checkpoint cannot be served."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint folder, its ``config.json`` or one of its shards is not there."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is readable, but its family, format or shape is refused."""


class AdapterError(MoeletError):
    """Base of everything that can be wrong with an adapter or its name."""


class AdapterNotFoundError(AdapterError):
    """No such adapter folder, or no ``adapter_config.json`` in it."""


class AdapterRefusedError(AdapterError):
    """The adapter was read and is refused.

    ``key`` is the tensor key or configuration field at fault; ``expected`` and ``found`` say
    what should have been there and what was.
    """

    def __init__(self, key: str, expected: str, found: str) -> None:
        super().__init__(f"{key}: expected {expected}, found {found}")
        self.key = key
        self.expected = expected
        self.found = found


class AdapterForbiddenError(AdapterError):
    """The path lies outside every adapter root, or runtime loading is off."""


class AdapterNotLoadedError(AdapterError):
    """No adapter of that name is loaded."""


class AdapterAlreadyLoadedError(AdapterError):
    """An adapter of that name is loaded already and no replacement was asked for."""


class AdapterBusyError(AdapterError):
    """Requests in flight still hold the adapter; ``in_flight`` counts them."""

    def __init__(self, message: str, in_flight: int) -> None:
        super().__init__(message)
        self.in_flight = in_flight


class AdapterCapacityError(AdapterError):
    """Every place is taken by adapters that are pinned or in use."""


class RequestError(MoeletError):
    """A forward call is malformed or contradicts itself; ``param`` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class LayerNotServedError(RequestError):
    """The layer is dense, was left out, or does not exist; the message lists those served."""


class EngineError(MoeletError):
    """The device refused or failed a piece of work."""


class EngineFailedError(EngineError):
    """The device failed for good (a sticky CUDA error): only a new process can recover."""
