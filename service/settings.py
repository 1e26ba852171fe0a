"""Every setting of ``serve``, read once from options and ``MOELET_…`` and checked before anything is opened."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..layer.errors import ConfigurationError
from .logs import LogFormat, LogLevel

ENV_PREFIX = "MOELET_"
OTHER_VARIABLES = frozenset({"MOELET_CACHE_DIR", "MOELET_CUBIN_DIR"})
"""Variables of ours that are no option of ``serve``."""

MOST_MB = 1 << 20
"""Of a body or of what waits, in units of 2^20 bytes: far more than fits, and as a number of bytes still a C long."""

Plan = Literal["auto", "fused", "single_stream", "two_stream", "two_stream_overlap_down"]


def layer_numbers(value: Any) -> Any:
    """``"0-3,7"`` as ``(0, 1, 2, 3, 7)``."""
    if not isinstance(value, str):
        return value
    numbers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError('should be layer numbers and ranges such as "0-3,7"')
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def known_device(value: str) -> str:
    """``value`` if it is a ``--device``."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value, re.ASCII) is None:
        raise ValueError("should be auto, cpu, cuda or cuda:N")
    return value


def comma_separated(value: Any) -> Any:
    """A string split at commas; anything else as it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def lowered(value: Any) -> Any:
    """A string in lower case, for those who write levels as Python does; anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def paths(value: Any) -> Any:
    """``"DIR,DIR"`` as a list; an empty part is no path, and above all not the folder we are in."""
    parts = comma_separated(value)
    if "" in parts:
        raise ValueError("should be paths separated by commas, none of them empty")
    return parts


def named_paths(value: Any) -> Any:
    """``["NAME=PATH", …]`` as ``((name, path), …)``."""
    pairs = []
    for item in comma_separated(value):
        if isinstance(item, str):
            name, equals, path = item.partition("=")
            if not (name and equals and path):
                raise ValueError("should be NAME=PATH")
            item = (name, Path(path))
        pairs.append(item)
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice} twice")
    return tuple(pairs)


def key(value: Any) -> Any:
    """A key that a request can carry after ``Authorization: Bearer``, without the line's end that secrets kept
    in files have; never told in what is said of it."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"[\x21-\x7e]{1,512}", value.strip()) is None:
        raise ValueError("should be a key of 1 to 512 visible ASCII characters")
    return value.strip()


def keys(value: Any) -> Any:
    """``"KEY,KEY"`` as a list of keys."""
    return [key(part) for part in comma_separated(value)]


SECRETS = ("api_key", "admin_api_key")

INSTEAD_OF = {"checkpoint": ("demo", False), "demo": ("checkpoint", None), "host": ("uds", None), "port": ("uds", None)}
"""Options that stand in the place of another: given on the command line they win over its variable too, and it has the
value beside it."""


class Settings(BaseSettings):
    """The options of ``serve``; each is also ``MOELET_<NAME>`` in the environment, in any case, and the option wins.

    ``plan``, ``max_decode_tokens`` and ``decode_shapes`` concern the GPU engine alone.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    checkpoint: Path | None = None
    demo: bool = False
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    uds: Path | None = None
    device: Annotated[str, AfterValidator(known_device)] = "auto"
    layers: Annotated[tuple[int, ...] | None, NoDecode, BeforeValidator(layer_numbers)] = None
    served_model_name: str | None = Field(None, min_length=1)
    adapter: Annotated[tuple[tuple[str, Path], ...], NoDecode, BeforeValidator(named_paths)] = ()
    adapter_root: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(paths)] = ()
    max_loras: int = Field(8, ge=1, le=1024)
    max_cpu_loras: int = Field(32, ge=1)
    max_lora_rank: int = Field(64, ge=1, le=4096)
    max_decode_tokens: int = Field(256, ge=1)
    decode_shapes: Annotated[tuple[PositiveInt, ...] | None, NoDecode, BeforeValidator(comma_separated)] = None
    plan: Plan = "auto"
    max_batch_tokens: int | None = Field(None, ge=1)
    max_queue: int = Field(1024, ge=1)
    max_queue_mb: float = Field(512.0, gt=0, le=MOST_MB)
    max_queue_delay_us: int = Field(0, ge=0, le=1_000_000)
    request_timeout_s: float = Field(60.0, gt=0, le=86400)
    api_key: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(keys)] = ()
    admin_api_key: Annotated[SecretStr | None, BeforeValidator(key)] = None
    max_body_mb: float = Field(64.0, gt=0, le=MOST_MB)
    body_timeout_s: float = Field(20.0, gt=0, le=86400)
    log_format: LogFormat = "text"
    log_level: Annotated[LogLevel, BeforeValidator(lowered)] = "info"

    @model_validator(mode="after")
    def _one_checkpoint(self) -> Self:
        if self.demo == (self.checkpoint is not None):
            raise ValueError(
                "CHECKPOINT or --demo, or one of MOELET_CHECKPOINT and MOELET_DEMO: give one of them, and not both"
                if self.demo
                else "CHECKPOINT is missing: give the folder of a checkpoint, or --demo"
            )
        return self

    @model_validator(mode="after")
    def _admin_key_apart(self) -> Self:
        if self.admin_api_key in self.api_key:
            raise ValueError("--admin-api-key is one of the keys of --api-key: give it to nobody but administrators")
        return self

    @classmethod
    def read(cls, **options: Any) -> "Settings":
        """Settings from ``options``, the environment where an option is absent or None, and the defaults.

        Raises ``ConfigurationError``: one sentence that names the option and says what it should be.
        """
        given = {name: value for name, value in options.items() if value is not None and value != []}
        replaced = {other: value for name, (other, value) in INSTEAD_OF.items() if given.get(name, False) is not False}
        told = replaced | given
        for name in cls.model_fields:
            if name not in told:
                _check_variables(name)
        try:
            return cls(**told)
        except ValidationError as error:
            raise ConfigurationError(_sentence(error, given)) from None

    @property
    def changed_gpu_options(self) -> tuple[str, ...]:
        """The GPU engine's options that are not at their default, for a warning where there is no GPU."""
        names = ("plan", "max_decode_tokens", "decode_shapes")
        fields = type(self).model_fields
        return tuple(_option(name) for name in names if getattr(self, name) != fields[name].default)


def unknown_variables() -> tuple[str, ...]:
    """``MOELET_…`` variables of the environment that nothing reads; a Kubernetes Service's are left out."""
    known = OTHER_VARIABLES.union(*map(_variables, Settings.model_fields))
    ours = {name for name in os.environ if name.lower().startswith(ENV_PREFIX.lower())}
    return tuple(sorted(name for name in ours - known if not re.search(r"_SERVICE_|_PORT(_|$)", name)))


def _variables(name: str) -> list[str]:
    """The variables of the environment that are read as the option ``name``: their case does not matter."""
    return [variable for variable in os.environ if variable.lower() == f"{ENV_PREFIX}{name}".lower()]


def _check_variables(name: str) -> None:
    """Raise ``ConfigurationError`` where the option ``name`` is an empty secret, or is there in several spellings."""
    variables = _variables(name)
    empty = [variable for variable in variables if not os.environ[variable]]
    if name in SECRETS and empty:  # of a secret that was not found: without it all would be open
        raise ConfigurationError(f"{empty[0]} is empty: set it to a key, or unset it to serve without one")
    if len(variables) - len(empty) > 1:
        raise ConfigurationError(f"{' and '.join(sorted(variables))} are one option: unset all of them but one")


def _option(name: str) -> str:
    return "CHECKPOINT" if name == "checkpoint" else "--" + name.replace("_", "-")


def _sentence(error: ValidationError, given: dict[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return text
    name = str(first["loc"][0])
    variable = next(filter(os.environ.get, _variables(name)), ENV_PREFIX + name.upper())
    if name in SECRETS:
        return f"{_option(name) if name in given else variable}: {text}"
    value = given.get(name, os.environ.get(variable))
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    where = _option(name) if name in given else variable
    hint = ""
    if name not in given and str(value).startswith("tcp://"):
        hint = ": Kubernetes sets it for a Service called moelet; pass --port, or set enableServiceLinks to false"
    return f"{where}: {text[:1].lower()}{text[1:]}, got {value!r}{hint}"
