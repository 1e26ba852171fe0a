"""CUDA sources to cubins by NVRTC, unless a store has them already, and what ptxas reports of each."""

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..layer.errors import ConfigurationError, DeviceUnavailableError
from .cubins import CubinStore, pack, unpack, write_whole
from .driver import USE_CPU, Device
from .nvrtc import NO_CACHE, CompileError, begin_compiling, compile_program, nvrtc_version
from .side_by_side import Halt, side_by_side

SOURCES = Path(__file__).resolve().parent.parent / "cuda"
"""The room of CUDA sources: next to this one in the repository and in an installed package alike."""

OPTIONS = ("--std=c++20", "-default-device", NO_CACHE, "--ptxas-options=-v")
DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says a kernel takes: registers a thread, and bytes of all else; spills are summed over the file."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled kernel; ``origin`` says whether it was ``compiled``, from the ``cache``, or ``shipped``."""

    kernel: str
    arch: str
    image: bytes
    log: str
    resources: Resources
    origin: str


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel with its compile-time numbers: the source file's name in ``cuda/`` and the macros defined for it."""

    source_file: str
    defines: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """The kernel's name: the file's stem."""
        return Path(self.source_file).stem

    def __str__(self) -> str:
        defines = " ".join(f"{name}={value}" for name, value in sorted(self.defines.items()))
        return f"{self.source_file} {defines}".rstrip()


def compile_kernel(
    source_file: str,
    defines: Mapping[str, int | str] | None = None,
    arch: str = DEFAULT_ARCH,
    *,
    store: CubinStore | None = None,
    sources: Path = SOURCES,
) -> Cubin:
    """The cubin of ``source_file`` (a name in ``cuda/``), its kernel being named as the file's stem.

    Headers are ``#include "common/….cuh"``. ``store`` defaults to the one that the environment names.
    Raises ``CompileError``, or ``ConfigurationError`` where there is no such source.
    """
    specialisation = Specialisation(source_file, defines or {})
    return compile_kernels([specialisation], arch, store=store, sources=sources)[str(specialisation)]


def compile_kernels(
    specialisations: Iterable[Specialisation],
    arch: str = DEFAULT_ARCH,
    *,
    store: CubinStore | None = None,
    sources: Path = SOURCES,
    told: Callable[[int, int], None] | None = None,
) -> dict[str, Cubin]:
    """The cubins of ``specialisations`` by their texts, as ``compile_kernel`` gives them.

    What is in no store is compiled side by side, by as many threads as there are cores, in the order given; ``told``
    hears how many of those are done, and of how many. Raises as ``compile_kernel`` does once one fails.
    """
    store = CubinStore.from_environment() if store is None else store
    cubins: dict[str, Cubin] = {}
    missing: list[_Job] = []
    for text, specialisation in {str(each): each for each in specialisations}.items():
        job = _Job.read(specialisation, arch, sources)
        kept = store.find(job.file_name)
        if kept is None:
            missing.append(job)
        else:
            cubins[text] = job.cubin(*kept)
    found = len(cubins)

    def keep(job: _Job, compiled: tuple[bytes, str]) -> None:
        store.keep(job.file_name, *compiled)
        cubins[str(job.specialisation)] = job.cubin(*compiled, "compiled")
        if told:
            told(len(cubins) - found, len(missing))

    if missing:
        begin_compiling()
        if told:
            told(0, len(missing))
        side_by_side(_Job.compile, missing, ended=keep)
    return cubins


def compile_all(
    specialisations: Iterable[Specialisation],
    arch: str,
    out_dir: Path,
    *,
    threads: int | None = None,
    sources: Path = SOURCES,
) -> list[Path]:
    """Compile ahead of time into ``out_dir``, to be named by ``MOELET_CUBIN_DIR``; needs no GPU.

    Raises ``CompileError`` for the first that fails, ``ConfigurationError`` where ``out_dir`` cannot be written, and
    ``DeviceUnavailableError`` where there is no NVRTC.
    """
    jobs = [_Job.read(specialisation, arch, sources) for specialisation in specialisations]

    def build(job: _Job, halt: Halt) -> None:
        path = out_dir / job.file_name
        if not path.exists() or unpack(path.read_bytes()) is None:
            write_whole(path, pack(*job.compile(halt)))

    begin_compiling()
    try:
        side_by_side(build, jobs, threads=threads)
    except OSError as error:
        raise ConfigurationError(f"cubins cannot be written to {out_dir}: {error.strerror}") from error
    return [out_dir / job.file_name for job in jobs]


def check_driver(device: Device) -> None:
    """Raise ``DeviceUnavailableError`` if the driver is of an older CUDA major version than the compiler."""
    compiler = nvrtc_version()
    if device.driver_version[0] < compiler[0]:
        raise DeviceUnavailableError(
            f"the NVIDIA driver supports CUDA {_dotted(device.driver_version)}, but kernels are compiled by CUDA "
            f"{_dotted(compiler)} and need a driver of CUDA {compiler[0]}.0 or newer: update it; {USE_CPU}"
        )


def parse_resources(log: str, kernel: str) -> Resources:
    """What ``ptxas -v`` reported of ``kernel``. Raises ``CompileError`` if the file defines no such kernel."""
    entry = re.search(rf"Compiling entry function '{re.escape(kernel)}'(.*?)(?=Compiling entry function|\Z)", log, re.S)
    used = re.search(r"Used (\d+) registers(.*)", entry.group(1)) if entry else None
    if used is None:
        raise CompileError(f'{kernel}.cu defines no kernel extern "C" __global__ {kernel}', log)
    shared = re.search(r"(\d+) bytes smem", used.group(2))
    return Resources(
        registers=int(used.group(1)),
        spill_stores=sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        spill_loads=sum(map(int, re.findall(r"(\d+) bytes spill loads", log))),
        shared_bytes=int(shared.group(1)) if shared else 0,
        stack_bytes=max(map(int, re.findall(r"(\d+) bytes stack frame", log)), default=0),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that decides what a kernel compiles to."""

    specialisation: Specialisation
    arch: str
    source: bytes
    headers: tuple[tuple[str, bytes], ...]

    @classmethod
    def read(cls, specialisation: Specialisation, arch: str, sources: Path) -> "_Job":
        try:
            source = (sources / specialisation.source_file).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"there is no kernel source {specialisation.source_file} in {sources}: {error.strerror}"
            ) from error
        found = sorted((sources / "common").glob("*.cuh"))
        return cls(specialisation, arch, source, tuple((f"common/{path.name}", path.read_bytes()) for path in found))

    @property
    def kernel(self) -> str:
        return self.specialisation.kernel

    @property
    def options(self) -> tuple[str, ...]:
        defines = (f"-D{name}={value}" for name, value in sorted(self.specialisation.defines.items()))
        return (*OPTIONS, f"--gpu-architecture={self.arch}", *defines)

    @property
    def file_name(self) -> str:
        """``<kernel>-<hash>.cubin``, the hash over source, headers, options and compiler."""
        digest = hashlib.sha256()
        texts = [option.encode() for option in self.options] + [_dotted(nvrtc_version()).encode()]
        for part in (self.source, *texts, *(part for name, text in self.headers for part in (name.encode(), text))):
            digest.update(struct.pack("<Q", len(part)) + part)
        return f"{self.kernel}-{digest.hexdigest()[:32]}.cubin"

    def cubin(self, image: bytes, log: str, origin: str) -> Cubin:
        """What is kept of it, or what it compiled to, as callers have it."""
        return Cubin(self.kernel, self.arch, image, log, parse_resources(log, self.kernel), origin)

    def compile(self, halt: Halt) -> tuple[bytes, str]:
        """The cubin and the log. Raises ``CompileError``, also soon after a ``halt`` is called."""
        name = self.specialisation.source_file
        cubin, log = compile_program(name, self.source, self.headers, self.options, halt)
        log = re.sub(r"ptxas info *: Compile time.*\n?", "", log).rstrip()  # the same source, the same file
        if cubin is None:
            raise CompileError(f"{self.specialisation} does not compile for {self.arch}: {_first_error(log)}", log)
        parse_resources(log, self.kernel)
        return cubin, log


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    return lines[0] if lines else "the compiler gave no reason"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
