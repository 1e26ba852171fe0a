"""Kernels compile anywhere, and cubins come whole from where they are kept or not at all."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moelet.graphs import ahead, compiler
from moelet.graphs.compiler import SOURCES, Specialisation, check_driver, compile_all, compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.driver import Device
from moelet.graphs.nvrtc import CompileError, nvrtc_version
from moelet.layer.errors import ConfigurationError, DeviceUnavailableError

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

SCALE = """
#include "common/scale.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x]); }
"""
SCALE_HEADER = "#pragma once\ninline float scaled(float x) { return x * FACTOR; }\n"

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
    float kept[128];
    #pragma unroll
    for (int i = 0; i < 128; i++) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = kept[i] * kept[(i + 64) % 128];
}
"""
SHARED = """
extern "C" __global__ void shared(float* x) {
    __shared__ float held[96];
    held[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = held[95 - threadIdx.x];
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "cuda"
    (folder / "common").mkdir(parents=True)
    (folder / "scale.cu").write_text(SCALE)
    (folder / "common/scale.cuh").write_text(SCALE_HEADER)
    (folder / "spilling.cu").write_text(SPILLING)
    (folder / "shared.cu").write_text(SHARED)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> CubinStore:
    return CubinStore(tmp_path / "cache")


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", refuse)


def kept_files(store: CubinStore) -> list[Path]:
    assert store.cache is not None
    return sorted(store.cache.iterdir())


def test_a_kernel_compiles_and_is_named_after_its_file(sources: Path, store: CubinStore) -> None:
    cubin = compile_kernel("scale.cu", {"FACTOR": "2.0f"}, store=store, sources=sources)
    assert cubin.image[:4] == b"\x7fELF"
    assert b"scale" in cubin.image
    assert (cubin.kernel, cubin.arch, cubin.origin) == ("scale", "sm_90a", "compiled")
    assert "Compiling entry function 'scale' for 'sm_90a'" in cubin.log
    assert 0 < cubin.resources.registers <= 32


def test_resources_are_what_the_kernel_takes(sources: Path, store: CubinStore) -> None:
    shared = compile_kernel("shared.cu", store=store, sources=sources).resources
    assert (shared.shared_bytes, shared.spill_stores, shared.spill_loads, shared.stack_bytes) == (96 * 4, 0, 0, 0)
    spilling = compile_kernel("spilling.cu", store=store, sources=sources).resources
    assert spilling.registers <= 32
    assert spilling.spill_stores >= 4 * (128 - 32)
    assert spilling.spill_loads > 0
    assert spilling.stack_bytes > 0


def test_the_second_time_comes_from_the_cache_the_same(
    sources: Path, store: CubinStore, request: pytest.FixtureRequest
) -> None:
    first = compile_kernel("scale.cu", {"FACTOR": 2}, store=store, sources=sources)
    request.getfixturevalue("no_compiling")
    second = compile_kernel("scale.cu", {"FACTOR": 2}, store=store, sources=sources)
    assert second == replace(first, origin="cache")
    [path] = kept_files(store)
    assert path.name.startswith("scale-")
    assert path.suffix == ".cubin"
    assert path.read_bytes().startswith(first.image)


def test_whatever_decides_the_code_decides_the_file(
    sources: Path, store: CubinStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(defines: dict[str, int | str], arch: str = "sm_90a") -> int:
        compile_kernel("scale.cu", defines, arch, store=store, sources=sources)
        return len(kept_files(store))

    assert build({"FACTOR": 2}) == 1
    assert build({"FACTOR": 3}) == 2
    assert build({"FACTOR": 2, "UNUSED": 1}) == 3
    assert build({"UNUSED": 1, "FACTOR": 2}) == 3
    assert build({"FACTOR": 2}, "sm_100a") == 4
    (sources / "common/scale.cuh").write_text(SCALE_HEADER + "// changed\n")
    assert build({"FACTOR": 2}) == 5
    (sources / "scale.cu").write_text(SCALE + "// changed\n")
    assert build({"FACTOR": 2}) == 6
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    assert build({"FACTOR": 2}) == 7


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "longer"])
def test_a_damaged_cubin_is_found_and_compiled_anew(
    damage: str, sources: Path, store: CubinStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = compile_kernel("shared.cu", store=store, sources=sources)
    [path] = kept_files(store)
    whole = path.read_bytes()
    flipped = bytes([*whole[:100], whole[100] ^ 1, *whole[101:]])
    path.write_bytes({"truncated": whole[:-7], "flipped": flipped, "empty": b"", "longer": whole + b"x"}[damage])
    assert compile_kernel("shared.cu", store=store, sources=sources) == first
    assert "is damaged and is compiled anew" in caplog.text
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_one_line(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CubinStore(tmp_path / "file" / "cache")
    caplog.set_level(logging.WARNING)
    for factor in (2, 3):
        cubin = compile_kernel("scale.cu", {"FACTOR": factor}, store=store, sources=sources)
        assert cubin.origin == "compiled"
    assert [record.message.split(":")[0] for record in caplog.records] == ["cubins are not cached"]


def test_shipped_cubins_are_looked_in_first_and_never_written(
    sources: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    wanted = [Specialisation("scale.cu", {"FACTOR": factor}) for factor in (2, 3)] + [Specialisation("shared.cu")]
    paths = compile_all(wanted, "sm_90a", shipped, threads=2, sources=sources)
    assert [path.name.split("-")[0] for path in paths] == ["scale", "scale", "shared"]
    assert sorted(shipped.iterdir()) == sorted(paths)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in paths)
    store = CubinStore(cache, shipped)
    local = compile_kernel("scale.cu", {"FACTOR": 4}, store=store, sources=sources)
    assert local.origin == "compiled"
    request.getfixturevalue("no_compiling")
    for specialisation in wanted:
        cubin = compile_kernel(specialisation.source_file, specialisation.defines, store=store, sources=sources)
        assert cubin.origin == "shipped"
    assert len(list(cache.iterdir())) == 1
    assert sorted(shipped.iterdir()) == sorted(paths)
    assert compile_all(wanted, "sm_90a", shipped, sources=sources) == paths


def test_compile_all_says_where_it_cannot_write(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="cubins cannot be written to"):
        compile_all([Specialisation("shared.cu")], "sm_90a", tmp_path / "file" / "out", sources=sources)


def test_a_write_that_fails_leaves_nothing(sources: Path, store: CubinStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    cache = store.cache
    assert cache is not None
    assert compile_kernel("shared.cu", store=store, sources=sources).origin == "compiled"
    assert list(cache.iterdir()) == []


def test_a_compile_error_carries_the_log_and_is_kept_nowhere(sources: Path, store: CubinStore) -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel("scale.cu", {"BLOCK_M": 4}, store=store, sources=sources)
    message = str(caught.value)
    assert message.startswith("scale.cu BLOCK_M=4 does not compile for sm_90a: common/scale.cuh(2): error:")
    assert "FACTOR" in message
    assert "1 error detected" in caught.value.log
    assert not (store.cache and store.cache.exists())


def test_an_assembler_error_and_a_wrong_architecture_are_compile_errors(sources: Path, store: CubinStore) -> None:
    (sources / "bogus.cu").write_text('extern "C" __global__ void bogus() { asm volatile("bogus;"); }')
    with pytest.raises(CompileError, match="Not a name of any known instruction"):
        compile_kernel("bogus.cu", store=store, sources=sources)
    with pytest.raises(CompileError, match="does not compile for sm_12345: nvrtc: error: invalid value"):
        compile_kernel("shared.cu", arch="sm_12345", store=store, sources=sources)


@pytest.mark.parametrize("text", ["__device__ int x;", "__global__ void misnamed(int* x) { *x = 1; }"])
def test_a_file_without_the_kernel_of_its_name_is_refused(text: str, sources: Path, store: CubinStore) -> None:
    (sources / "misnamed.cu").write_text(text)
    with pytest.raises(CompileError, match=r'misnamed\.cu defines no kernel extern "C" __global__ misnamed'):
        compile_kernel("misnamed.cu", store=store, sources=sources)


def test_a_source_that_is_not_there_is_named(store: CubinStore) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no kernel source nowhere\.cu in .*cuda"):
        compile_kernel("nowhere.cu", store=store)


def test_the_sources_are_the_room_beside_this_one() -> None:
    assert Path(__file__).resolve().parent.parent / "cuda" == SOURCES


def test_the_environment_names_the_folders() -> None:
    store = CubinStore.from_environment({"MOELET_CACHE_DIR": "/a", "MOELET_CUBIN_DIR": "/b"})
    assert (store.cache, store.shipped) == (Path("/a"), Path("/b"))
    store = CubinStore.from_environment({})
    assert (store.cache, store.shipped) == (Path(os.path.expanduser("~")) / ".cache/moelet", None)  # noqa: PTH111


@pytest.mark.parametrize(("asked", "code"), [(["-h"], 0), (["--help"], 0), ([], 2), (["--out", "x"], 2), (["-o"], 2)])
def test_what_is_an_option_is_no_folder_to_compile_into(
    asked: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ahead, "compile_all", lambda *_: [])
    assert ahead.main(asked) == code
    told = capsys.readouterr()
    assert (told.err if code else told.out).startswith("usage: python -m moelet.graphs.ahead FOLDER")
    assert list(tmp_path.iterdir()) == []


def test_an_older_driver_is_refused_in_one_sentence() -> None:
    major, minor = nvrtc_version()
    device = Device(
        ordinal=0,
        name="",
        compute_capability=(9, 0),
        sm_count=1,
        max_shared_memory=1,
        l2_bytes=1,
        total_memory=1,
        driver_version=(major, 0),
        context=None,
    )
    check_driver(device)
    with pytest.raises(DeviceUnavailableError) as caught:
        check_driver(replace(device, driver_version=(major - 1, 8)))
    assert f"supports CUDA {major - 1}.8, but kernels are compiled by CUDA {major}.{minor}" in str(caught.value)
    assert "--device cpu" in str(caught.value)
