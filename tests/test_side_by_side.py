"""Kernels compile side by side: as many at once as there are cores, and all end once one fails or a signal comes."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moelet.graphs import kernels, signal_actions
from moelet.graphs.compiler import Specialisation, compile_kernel, compile_kernels
from moelet.graphs.cubins import CubinStore, unpack
from moelet.graphs.nvrtc import CompileError
from moelet.graphs.side_by_side import Halt, side_by_side
from served_process import SOURCES, process, wait_for_line

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

SMALL = 'extern "C" __global__ void small(float* x) { x[threadIdx.x] *= FACTOR; }'
BROKEN = Specialisation("expert_mlp.cu", {"LORA": 1})
SLOW = max(kernels.expert_mlps(), key=kernels.effort)
"""What takes many seconds to compile."""

COMPILES_AT_START = """
from moelet.graphs import compiler, kernels
from moelet.graphs.compiler import Specialisation, compile_kernels
from moelet.graphs.cubins import CubinStore
from moelet.layer.checkpoint import Checkpoint
compiler.side_by_side.__globals__["usable_cores"] = lambda: 2
slow = [each for each in kernels.expert_mlps() if each.defines["LORA"]]
def compiling(self, index):
    print("load begins", flush=True)
    compile_kernels({wanted}, store=CubinStore(None))
Checkpoint.load_layer = compiling
"""
FILLS_THE_CACHE = """
import sys
from pathlib import Path
from moelet.graphs.compiler import Specialisation, compile_kernels
from moelet.graphs.cubins import CubinStore
print("ready", flush=True)
sys.stdin.readline()
wanted = [Specialisation("small.cu", {"FACTOR": factor}) for factor in range(12)]
cubins = compile_kernels(wanted, store=CubinStore(Path(sys.argv[1]) / "cache"), sources=Path(sys.argv[1]))
assert len(cubins) == 12
"""
SIGNAL_ACTIONS = """
import ctypes, signal, sys
from pathlib import Path
from moelet.graphs import compiler, nvrtc
from moelet.graphs.cubins import CubinStore
class Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )
def tell():
    found = [Action(), Action()]
    for number, action in zip((signal.SIGINT, signal.SIGTERM), found):
        assert ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action)) == 0
    print([(action.handler, action.flags) for action in found])
for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a shell ignores the former
    signal.signal(number, lambda *_: None)
if sys.argv[2]:
    nvrtc.keeping_signal_actions = lambda work: work()
tell()
compiler.compile_kernel("small.cu", {"FACTOR": 2}, store=CubinStore(None), sources=Path(sys.argv[1]))
tell()
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    (tmp_path / "small.cu").write_text(SMALL)

    def compiled(*factors: int, **options: Any) -> dict[str, Any]:
        wanted = [Specialisation("small.cu", {"FACTOR": factor}) for factor in factors]
        return compile_kernels(wanted, store=CubinStore(tmp_path / "cache"), sources=tmp_path, **options)

    compiled(-1)  # the first of a process goes about it in its own way
    return compiled


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 5}, raising=False)


@pytest.mark.usefixtures("three_cores")
def test_as_many_are_compiled_at_once_as_there_are_cores(
    small: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3, timeout=60)
    threads = set()

    def compiled(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        together.wait()  # for all three, or the test fails
        return compile_program(*arguments)

    compile_program = nvrtc.nvrtcCompileProgram
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", compiled)
    cubins = small(*range(6))
    assert len(threads) == 3
    assert list({cubin.origin for cubin in cubins.values()}) == ["compiled"]
    assert len({cubin.image for cubin in cubins.values()}) == 6


def test_cubins_are_those_of_one_after_the_other_whatever_they_come_from(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    small(1, 2)
    cubins = small(1, 2, 3, 4, 5, 3, told=lambda *count: told.append(count))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)], "what is found is not counted"
    assert sorted(cubins) == [f"small.cu FACTOR={factor}" for factor in range(1, 6)]
    for factor in range(1, 6):
        alone = compile_kernel("small.cu", {"FACTOR": factor}, store=CubinStore(None), sources=tmp_path)
        together = cubins[f"small.cu FACTOR={factor}"]
        assert (alone.image, alone.log, alone.resources) == (together.image, together.log, together.resources)
        assert together.origin == ("cache" if factor < 3 else "compiled")
    told.clear()
    small(1, 2, 3, told=lambda *count: told.append(count))
    assert told == []


@pytest.mark.usefixtures("three_cores", "small")
def test_one_that_fails_calls_the_others_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    def compiled(*arguments: Any) -> Any:
        result = compile_program(*arguments)
        ends.append(result[0].name)
        return result

    compile_program = nvrtc.nvrtcCompileProgram
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", compiled)
    with pytest.raises(CompileError) as caught:
        compile_kernels([SLOW, BROKEN], store=CubinStore(tmp_path / "kept"))
    assert ends == ["NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_CANCELLED"]
    assert not (tmp_path / "kept").exists()
    with pytest.raises(CompileError) as alone:
        compile_kernel(BROKEN.source_file, BROKEN.defines, store=CubinStore(None))
    assert (str(caught.value), caught.value.log) == (str(alone.value), alone.value.log)
    assert "expert_mlp.cu LORA=1 does not compile for sm_90a" in str(caught.value)


def test_what_has_not_begun_is_not_begun_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, halt: Halt) -> None:
        begun.append(item)
        if item == 0:
            raise ValueError(item)
        while not halt.called:
            time.sleep(0.001)

    with pytest.raises(ValueError, match=r"^0$"):
        side_by_side(work, range(10), threads=1)
    assert begun in ([0], [0, 1])


@pytest.mark.parametrize("restored", [True, False])
def test_signals_do_afterwards_what_they_did(restored: bool, tmp_path: Path) -> None:
    """NVRTC leaves them changed, once for a process: a wait of the main thread would not end by one."""
    (tmp_path / "small.cu").write_text(SMALL)
    said = subprocess.run(
        [sys.executable, "-c", SIGNAL_ACTIONS, str(tmp_path), "" if restored else "as NVRTC leaves them"],
        env=os.environ | {"PYTHONPATH": SOURCES},
        check=True,
        capture_output=True,
        text=True,
    )
    before, after = said.stdout.splitlines()
    assert (before == after) is restored, said


def test_they_are_kept_until_the_work_has_ended_whatever_a_handler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    libc, goes_on, ended = ctypes.CDLL(None), threading.Event(), threading.Event()

    def handler() -> int:
        action = (ctypes.c_size_t * 128)()
        libc.sigaction(int(signal.SIGTERM), None, action)
        return action[0]

    def interrupted(seconds: float) -> None:
        if not goes_on.is_set():
            goes_on.set()
            raise KeyboardInterrupt
        sleep(seconds)

    def work() -> None:
        goes_on.wait(10)
        libc.signal(int(signal.SIGTERM), 1)  # it is ignored
        ended.set()

    before, sleep = handler(), time.sleep
    monkeypatch.setattr(signal_actions.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        signal_actions.keeping_signal_actions(work)
    assert ended.wait(10)
    assert handler() == before


def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    (tmp_path / "small.cu").write_text(SMALL)
    start = [sys.executable, "-c", FILLS_THE_CACHE, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(start, env=os.environ | {"PYTHONPATH": SOURCES}, **pipes) for _ in range(2)]
    for each in both:
        wait_for_line(each, "ready")
    for each in both:
        each.communicate("go\n", timeout=60)
    assert [each.returncode for each in both] == [0, 0]
    kept = sorted((tmp_path / "cache").iterdir())
    assert len(kept) == 12
    assert all(path.suffix == ".cubin" and unpack(path.read_bytes()) is not None for path in kept)


def test_a_signal_while_kernels_compile_ends_a_start_at_once(tmp_path: Path) -> None:
    before = COMPILES_AT_START.format(wanted="slow")
    with process(tmp_path, tmp_path / "log", before=before) as started:
        wait_for_line(started, "load begins")
        time.sleep(0.5)
        started.send_signal(signal.SIGTERM)
        assert started.wait(5) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_kernel_that_does_not_compile_ends_a_start_with_its_sentence(tmp_path: Path) -> None:
    before = COMPILES_AT_START.format(wanted='[slow[0], Specialisation("expert_mlp.cu", {"LORA": 1})]')
    with process(tmp_path, tmp_path / "log", before=before) as started:
        assert started.wait(60) == 2, "not killed by the compiler's end under its own threads"
    log = (tmp_path / "log").read_text()
    assert "moelet: expert_mlp.cu LORA=1 does not compile for sm_90a: " in log
    assert "Traceback" not in log
