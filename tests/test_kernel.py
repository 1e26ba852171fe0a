"""Arguments reach the kernel as they were typed, and launches that cannot be right are refused."""

import struct

import pytest

from fake_driver import FakeDriver, ok
from moelet.graphs.arguments import float32, int32, int64, pointer
from moelet.graphs.compiler import Cubin, Resources
from moelet.graphs.driver import DriverError, driver
from moelet.graphs.kernel import Kernel, PreparedLaunch
from moelet.graphs.streams import Stream
from moelet.layer.errors import EngineError, EngineFailedError

pytest.importorskip("cuda.bindings.driver")

CUBIN = Cubin("scale", "sm_90a", b"\x7fELF", "", Resources(16, 0, 0, 1024, 0), "compiled")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver().install(monkeypatch)
    fake.parameter_sizes = [8, 4, 8, 4]
    return fake


def prepared(stream: Stream, kernel: Kernel | None = None, **changes: object) -> PreparedLaunch:
    arguments = {
        "x": pointer(0x7F0000000100),
        "tokens": int32(-3),
        "stride": int64(-(1 << 40)),
        "scale": float32(0.5),
    }
    options = {"grid": (132, 2, 1), "block": (128, 1, 1), "stream": stream, "arguments": arguments, "waits": True}
    return (kernel or Kernel(CUBIN)).prepare(**{**options, **changes})


def expected(**changes: object) -> bytes:
    values = {"x": 0x7F0000000100, "tokens": -3, "stride": -(1 << 40), "scale": 0.5}
    return struct.pack("<Qiqf", *{**values, **changes}.values())


def test_arguments_arrive_as_typed_and_change_in_place(fake: FakeDriver) -> None:
    main = Stream("main")
    launch = prepared(main)
    launch.launch()
    launch.set("tokens", 9)
    launch.launch()
    assert fake.launches == [(int(main), expected()), (int(main), expected(tokens=9))]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 1 << 31), ("stride", 1 << 63), ("x", -1), ("tokens", 1.5), ("scale", 1e39), ("none", 0)],
)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(name: str, value: object, fake: FakeDriver) -> None:
    launch = prepared(Stream("main"))
    with pytest.raises(EngineError, match=name):
        launch.set(name, value)
    launch.launch()
    assert fake.launches[0][1] == expected()


@pytest.mark.usefixtures("fake")
def test_arguments_that_the_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(EngineError, match=r"takes parameters of \[8, 4, 8, 4\] bytes, but the arguments x have"):
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
