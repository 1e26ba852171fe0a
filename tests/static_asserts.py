"""Holds numbers of the Python code against the CUDA sources: the compiler evaluates both sides, no GPU needed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from moelet.graphs.compiler import SOURCES, Specialisation, compile_kernel
from moelet.graphs.cubins import CubinStore


def check(folder: Path, opening: str, asserts: Iterable[str], defines: Mapping[str, int] | None = None) -> None:
    """Compile ``opening`` and a ``static_assert`` for each of ``asserts``. Raises ``CompileError`` for a false one."""
    lines = [opening, *(f"static_assert({text});" for text in asserts), 'extern "C" __global__ void twin() {}']
    (folder / "twin.cu").write_text("\n".join(lines))
    if not (folder / "common").exists():
        (folder / "common").symlink_to(SOURCES / "common")
    compile_kernel("twin.cu", defines, store=CubinStore(None), sources=folder)


def defines_of(specialisation: Specialisation) -> dict[str, int]:
    """What a kernel is compiled with, as ``check`` takes it."""
    return {name: int(value) for name, value in specialisation.defines.items()}


def constants_of(source: str, until: str) -> str:
    """The top of ``cuda/<source>``, up to the line that begins with ``until``: includes, constants, structs."""
    text = (SOURCES / source).read_text()
    top, found, _ = text.partition(f"\n{until}")
    assert found, f"{source} has no line that begins with {until}"
    return top
