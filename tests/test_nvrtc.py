"""NVRTC is our own, begun with once, by one thread, and told only of options that it knows."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moelet.graphs import ahead
from moelet.graphs import nvrtc as library
from moelet.graphs.compiler import compile_kernel
from moelet.graphs.cubins import CubinStore

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture
def first_of_the_process() -> Iterator[None]:
    library.knows_no_cache.cache_clear()
    yield
    library.knows_no_cache.cache_clear()


@pytest.mark.usefixtures("first_of_the_process")
def test_two_threads_that_compile_first_do_not_take_what_the_other_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []

    def keeping(work: Callable[[], bool]) -> bool:
        under_way.append(len(under_way))
        time.sleep(0.2)
        return work()

    monkeypatch.setattr(library, "keeping_signal_actions", keeping)
    with ThreadPoolExecutor(2) as threads:
        for begun in [threads.submit(library.begin_compiling) for _ in range(2)]:
            begun.result()
    assert under_way == [0]


OLDER = """
int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 8; return 0; }
"""
COMPILED = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from moelet.graphs.compiler import compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.nvrtc import nvrtc_version
compile_kernel("gather.cu", {}, "sm_90a", store=CubinStore(None))
print(nvrtc_version()[0])
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_ours_compiles_where_another_is_loaded_already(tmp_path: Path) -> None:
    """As that of CUDA 12 is where a PyTorch for it was imported before."""
    (tmp_path / "older.c").write_text(OLDER)
    older = tmp_path / "libnvrtc.so.12"
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{older.name}", "-o", str(older), str(tmp_path / "older.c")]
    subprocess.run(command, check=True)
    ran = subprocess.run([sys.executable, "-c", COMPILED, str(older)], capture_output=True, text=True, timeout=100)
    assert (ran.stdout, ran.returncode) == ("13\n", 0), ran.stderr


@pytest.mark.usefixtures("first_of_the_process")
def test_where_there_is_no_compiler_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent:
        def __getattr__(self, name: str) -> Any:
            def called(*_: object) -> None:
                raise RuntimeError(f"{name} is nowhere")

            return called

    monkeypatch.setattr(library, "nvrtc", Absent())
    assert ahead.main([str(tmp_path / "cubins")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("the kernels were not compiled: the Python package nvidia-cuda-nvrtc is not installed")
    assert told.count("\n") == 1


@pytest.mark.usefixtures("first_of_the_process")
def test_one_that_does_not_know_of_its_cache_is_not_told_to_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC 13.0 before its first update refuses the option, as it would any that it does not know."""
    compile_program = nvrtc.nvrtcCompileProgram

    def compiled(program: object, count: int, options: list[bytes]) -> object:
        refused = {library.NO_CACHE.encode(): b"--unheard-of"}
        return compile_program(program, count, [refused.get(option, option) for option in options])

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", compiled)
    (tmp_path / "small.cu").write_text('extern "C" __global__ void small(float* x) { x[threadIdx.x] *= 2; }')
    cubin = compile_kernel("small.cu", store=CubinStore(None), sources=tmp_path)
    assert cubin.resources.registers > 0
