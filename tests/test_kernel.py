"""Arguments reach the kernel as they were typed, and launches that cannot be right are refused."""

import struct

import pytest

from fake_driver import FakeDriver, ok
from moelet.graphs.arguments import ArgumentBlock
from moelet.graphs.compiler import Cubin, Resources
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.kernel import (
    Kernel,
    PreparedLaunch,
    encode_tensor_map_2d,
    float32,
    int32,
    int64,
    pointer,
    raw,
    uint32,
)
from moelet.graphs.streams import Stream
from moelet.layer.errors import EngineError, EngineFailedError

pytest.importorskip("cuda.bindings.driver")

CUBIN = Cubin("scale", "sm_90a", b"\x7fELF", "", Resources(16, 0, 0, 1024, 0), "compiled")
MAP = bytes(range(128))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver().install(monkeypatch)
    fake.parameter_sizes = [8, 4, 128, 4, 8, 4]
    return fake


def prepared(stream: Stream, kernel: Kernel | None = None, **changes: object) -> PreparedLaunch:
    arguments = {
        "x": pointer(0x7F0000000100),
        "tokens": int32(-3),
        "map": raw(MAP),
        "count": uint32(0xFFFFFFFF),
        "stride": int64(-(1 << 40)),
        "scale": float32(0.5),
    }
    options = {"grid": (132, 2, 1), "block": (128, 1, 1), "stream": stream, "arguments": arguments, "waits": True}
    return (kernel or Kernel(CUBIN)).prepare(**{**options, **changes})


def expected(**changes: object) -> bytes:
    values = {"x": 0x7F0000000100, "tokens": -3, "map": MAP, "count": 0xFFFFFFFF, "stride": -(1 << 40), "scale": 0.5}
    return struct.pack("<Qi128sIqf", *{**values, **changes}.values())


def test_arguments_arrive_as_typed_and_change_in_place(fake: FakeDriver) -> None:
    main, side = Stream("main"), Stream("side")
    launch = prepared(main)
    launch.launch()
    launch.set("tokens", 9)
    launch.set("map", MAP[::-1])
    launch.launch()
    launch.with_stream(side).launch()
    changed = expected(tokens=9, map=MAP[::-1])
    assert fake.launches == [(int(main), expected()), (int(main), changed), (int(side), changed)]


def test_raw_structs_are_aligned_as_tensor_maps_must_be() -> None:
    block = ArgumentBlock({"a": int32(1), "map": raw(MAP), "b": int32(2), "c": pointer(3)})
    pointers = [block._pointers[i] for i in range(4)]
    assert pointers[1] % 64 == 0
    assert pointers[3] % 8 == 0
    assert block.sizes == [4, 128, 4, 8]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 1 << 31), ("count", -1), ("map", MAP[:-1]), ("x", -1), ("tokens", 1.5), ("none", 0)]
)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(name: str, value: object, fake: FakeDriver) -> None:
    launch = prepared(Stream("main"))
    with pytest.raises(EngineError, match=name):
        launch.set(name, value)
    launch.launch()
    assert fake.launches[0][1] == expected()


@pytest.mark.usefixtures("fake")
def test_arguments_that_the_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(
        EngineError, match=r"takes parameters of \[8, 4, 128, 4, 8, 4\] bytes, but the arguments x have"
    ):
        prepared(Stream("main"), arguments={"x": pointer(0)})


def test_a_launch_declares_what_it_touches(fake: FakeDriver) -> None:
    reads, writes = frozenset({"x"}), frozenset({"y"})
    launch = prepared(Stream("main"), reads=reads, writes=writes, label="scale.gate", waits=False)
    assert (launch.label, launch.reads, launch.writes, launch.waits) == ("scale.gate", reads, writes, False)
    assert prepared(Stream("main")).label == "scale"
    assert fake.launches == []


@pytest.mark.usefixtures("fake")
def test_a_kernel_that_does_not_wait_may_not_start_early() -> None:
    with pytest.raises(EngineError, match="does not wait for its predecessor"):
        prepared(Stream("main"), waits=False, programmatic=True)


def test_large_shared_memory_is_asked_for_at_load_once(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def set_attribute(*args: object) -> tuple:
        asked.append(args[1:])
        return ok()

    monkeypatch.setattr(driver, "cuFuncSetAttribute", set_attribute)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    Kernel(CUBIN, 47 * 1024)  # with the 1 KiB that the kernel declares itself, exactly what needs no asking
    assert asked == []
    kernel = Kernel(CUBIN, 200_000)
    assert asked == [(attribute, 200_000)]
    assert "cuFuncLoad" in fake.calls
    prepared(Stream("main"), kernel, dynamic_shared_bytes=200_000).launch()
    with pytest.raises(EngineError, match="loaded for 200000 bytes of dynamic shared memory, got 200001"):
        prepared(Stream("main"), kernel, dynamic_shared_bytes=200_001)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("code", "kind"),
    [("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", DriverError), ("CUDA_ERROR_ILLEGAL_ADDRESS", EngineFailedError)],
)
def test_a_launch_that_fails_names_the_kernel(code: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (getattr(driver.CUresult, code),))
    launch = prepared(Stream("main"), label="scale.up")
    with pytest.raises(kind, match=f"cuLaunchKernelEx of scale.up failed with {code}"):
        launch.launch()


def test_tensor_maps_are_encoded_innermost_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []

    def encode(*args: object) -> tuple:
        seen.append(args)
        tensor_map = driver.CUtensorMap()
        tensor_map.opaque = [driver.cuuint64_t(0x0102030405060708 + i) for i in range(16)]
        return ok(tensor_map)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    data = encode_tensor_map_2d(0x1000, rows=4096, cols=64, box_rows=128, box_cols=32, swizzle128=True)
    assert data == b"".join((0x0102030405060708 + i).to_bytes(8, "little") for i in range(16))
    [(dtype, rank, base, sizes, strides, box, steps, _, swizzle, *_)] = seen
    assert dtype == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert (rank, base) == (2, 0x1000)
    assert [[int(value) for value in values] for values in (sizes, strides, box, steps)] == [
        [64, 4096],
        [128],
        [32, 128],
        [1, 1],
    ]
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    encode_tensor_map_2d(0x1000, 4096, 256, 128, 128, swizzle128=False)
    assert seen[1][8] == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE


@pytest.mark.parametrize(
    ("base", "cols", "box_rows", "box_cols"),
    [(0x1008, 64, 64, 64), (0x1000, 60, 64, 32), (0x1000, 64, 257, 64), (0x1000, 64, 64, 4), (0x1000, 256, 64, 128)],
)
def test_tensor_maps_that_the_hardware_refuses_are_refused(base: int, cols: int, box_rows: int, box_cols: int) -> None:
    with pytest.raises(EngineError, match="16 bytes"):
        encode_tensor_map_2d(base, 128, cols, box_rows, box_cols)
