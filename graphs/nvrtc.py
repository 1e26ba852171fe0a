"""NVRTC, the compiler in a library: programs to cubins, whatever signals and caches of its own it would bring along."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from threading import Lock
from typing import Any, NamedTuple

from ..layer.errors import DeviceUnavailableError, EngineError
from .driver import USE_CPU, bindings
from .side_by_side import Halt
from .signal_actions import keeping_signal_actions

nvrtc = bindings("nvrtc")

NO_CACHE = "--no-cache"
"""A result from NVRTC's own cache has no report of ptxas. CUDA 13.0 before its first update had neither the cache nor
the option, and PyTorch 2.9 for CUDA 13 asks for just that version."""
LIBRARIES = ("libnvrtc-builtins.so.", "libnvrtc.so.")
"""Of the package nvidia-cuda-nvrtc, the second of which looks for the first beside whichever NVRTC was loaded first."""
_BEGINNING = Lock()


class CompileError(EngineError):
    """A kernel does not compile; ``log`` is all that the compiler said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log
        self.add_note(log)


class Compiled(NamedTuple):
    """What came of a program: ``cubin``, or None where it does not compile, and all that the compiler said."""

    cubin: bytes | None
    log: str


def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC library in use. Raises ``DeviceUnavailableError`` where there is none."""
    _load_own()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # the bindings raise their own kind of it where the library cannot be loaded
        raise DeviceUnavailableError(f"the Python package nvidia-cuda-nvrtc is not installed; {USE_CPU}") from None
    return int(major), int(minor)


@cache
def _load_own() -> None:
    """Load the NVRTC that this package asks for, if it is installed as such: else the bindings take what is loaded
    already, and a PyTorch for CUDA 12 has loaded its own by now, which compiles other code."""
    with suppress(PackageNotFoundError, OSError):
        shared = files("nvidia-cuda-nvrtc") or []
        for file in (file for library in LIBRARIES for file in shared if file.name.startswith(library)):
            ctypes.CDLL(str(file.locate()))


def begin_compiling() -> None:
    """Let NVRTC compile nothing, once for a process: the first time it sets actions of its own on SIGINT and SIGTERM,
    by which the process would end with a crash, and what it leaves behind lets waits go on after them.

    Raises ``DeviceUnavailableError`` where there is no NVRTC.
    """
    nvrtc_version()
    with _BEGINNING:  # a second thread would take what the first one's compile has set for what there was
        knows_no_cache()


def compile_program(
    name: str, source: bytes, headers: Sequence[tuple[str, bytes]], options: Sequence[str], halt: Halt
) -> Compiled:
    """``source``, called ``name`` in messages, with what it includes; call ``begin_compiling`` before.

    Raises ``CompileError`` where NVRTC itself fails; soon after ``halt`` is called, there is no cubin.
    """
    names, texts = [header.encode() for header, _ in headers], [text for _, text in headers]
    known = [option.encode() for option in options if option != NO_CACHE or knows_no_cache()]
    program = _call(nvrtc.nvrtcCreateProgram, source, name.encode(), len(names), texts, names)
    try:
        _call(nvrtc.nvrtcSetFlowCallback, program, halt.callback, 0)
        error = nvrtc.nvrtcCompileProgram(program, len(known), known)[0]
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        cubin = None if error != 0 else _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Compiled(cubin, log.rstrip("\0 \n"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def knows_no_cache() -> bool:
    """Whether there is that option, which the first compile of the process finds out."""
    return keeping_signal_actions(_first_compile)


def _first_compile() -> bool:
    known = _compiles_nothing([NO_CACHE.encode()])
    if not known:  # nothing was compiled yet
        _compiles_nothing([])
    return known


def _compiles_nothing(options: Sequence[bytes]) -> bool:
    program = _call(nvrtc.nvrtcCreateProgram, b"", b"nothing.cu", 0, [], [])
    error = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    nvrtc.nvrtcDestroyProgram(program)
    return bool(error == 0)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    error, *values = function(*args)
    if error != 0:
        raise CompileError(f"{function.__name__} failed with {error.name}", "")
    return values[0] if values else None


def _text(program: Any, size_of: Callable[..., Any], read: Callable[..., Any]) -> bytes:
    buffer = bytes(_call(size_of, program))  # the binding writes into it
    if len(buffer) > 1:
        _call(read, program, buffer)
    return buffer
