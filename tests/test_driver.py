"""Driver calls are checked and explained; a machine that cannot serve says so in one sentence."""

import threading

import pytest

from fake_driver import FakeDriver
from moelet.graphs import driver as driver_module
from moelet.graphs.driver import (
    CAUSES,
    STICKY,
    DriverError,
    bindings,
    call,
    check,
    driver,
    open_device,
)
from moelet.graphs.streams import Events, Streams
from moelet.layer.errors import DeviceUnavailableError, EngineFailedError

pytest.importorskip("cuda.bindings.driver")

RESULT = driver.CUresult


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def named(name: str, result: tuple) -> object:
    def function(*_args: object) -> tuple:
        return result

    function.__name__ = name
    return function


def test_call_unwraps_none_one_and_several_values() -> None:
    assert call(named("cuCall", (RESULT.CUDA_SUCCESS,))) is None
    assert call(named("cuCall", (RESULT.CUDA_SUCCESS, 5))) == 5
    assert call(named("cuCall", (RESULT.CUDA_SUCCESS, 5, 6))) == (5, 6)


@pytest.mark.usefixtures("fake")
def test_an_error_names_the_call_the_error_and_its_usual_cause() -> None:
    with pytest.raises(DriverError) as caught:
        call(named("cuMemAlloc", (RESULT.CUDA_ERROR_OUT_OF_MEMORY, None)), 10)
    assert str(caught.value).startswith(
        "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2: what the driver says of it); usually the GPU has no room"
    )
    assert (caught.value.call, caught.value.error) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    assert not isinstance(caught.value, EngineFailedError)


@pytest.mark.usefixtures("fake")
def test_an_error_without_a_known_cause_still_names_itself() -> None:
    with pytest.raises(DriverError, match=r"^cuX failed with CUDA_ERROR_PROFILER_DISABLED \(5: [^;]*\)$"):
        check((RESULT.CUDA_ERROR_PROFILER_DISABLED,), "cuX")


@pytest.mark.parametrize("name", sorted(STICKY))
@pytest.mark.usefixtures("fake")
def test_sticky_errors_ask_for_a_new_process(name: str) -> None:
    with pytest.raises(EngineFailedError, match=r"the process must be restarted$"):
        check((getattr(RESULT, name),), "cuEventSynchronize")


def test_the_tables_name_real_errors() -> None:
    names = {code.name for code in RESULT}
    assert set(CAUSES) <= names
    assert names >= STICKY


def test_an_error_is_told_even_where_the_driver_library_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", raiser(RuntimeError("no libcuda")))
    with pytest.raises(EngineFailedError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        check((RESULT.CUDA_ERROR_ILLEGAL_ADDRESS,), "cuX")


def raiser(error: Exception) -> object:
    def function(*_args: object) -> None:
        raise error

    return function


def test_open_device_reads_what_the_driver_says(fake: FakeDriver) -> None:
    device = open_device(0)
    assert (device.name, device.compute_capability, device.arch) == ("Fake H200", (9, 0), "sm_90a")
    assert (device.sm_count, device.max_shared_memory, device.l2_bytes) == (132, 232448, 62914560)
    assert (device.total_memory, device.driver_version) == (1 << 37, (13, 0))
    assert device.memory() == (1 << 36, 1 << 37)
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == fake.calls.count("cuCtxSetCurrent") == 1
    thread = threading.Thread(target=device.make_current)
    thread.start()
    thread.join()
    assert fake.calls.count("cuCtxSetCurrent") == 2
    device.close()
    assert fake.calls[-1] == "cuDevicePrimaryCtxRelease"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"device_count": 0}, "there is no GPU 0: the driver shows 0 of them"),
        ({"capability": (8, 0)}, "Fake H200 has compute capability 8.0, and the kernels need 9.0"),
        ({"capability": (10, 0)}, "Fake H200 has compute capability 10.0, for which there are no kernels yet"),
    ],
)
def test_an_unusable_gpu_is_refused_in_one_sentence(fault: dict, sentence: str, fake: FakeDriver) -> None:
    vars(fake).update(fault)
    with pytest.raises(DeviceUnavailableError) as caught:
        open_device(0)
    assert str(caught.value).startswith(sentence)
    assert "--device cpu" in str(caught.value)
    assert "cuDevicePrimaryCtxRetain" not in fake.calls


def test_no_driver_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", raiser(RuntimeError("libcuda.so.1: cannot open")))
    with pytest.raises(DeviceUnavailableError, match=r"^no NVIDIA driver was found on this machine; .*--device cpu$"):
        open_device(0)


@pytest.mark.usefixtures("fake")
def test_a_driver_without_a_device_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", named("cuInit", (RESULT.CUDA_ERROR_NO_DEVICE,)))
    with pytest.raises(DeviceUnavailableError, match=r"^no GPU can be used: cuInit .*NO_DEVICE.*--device cpu$"):
        open_device(0)


def test_without_the_bindings_only_their_use_fails() -> None:
    absent = bindings("no_such_module")
    with pytest.raises(DeviceUnavailableError, match=r"cuda-bindings is not installed; .*--device cpu"):
        absent.cuInit(0)


def test_without_the_bindings_opening_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "driver", bindings("no_such_module"))
    with pytest.raises(DeviceUnavailableError, match="cuda-bindings is not installed"):
        open_device(0)


def test_streams_and_events_are_made_once_and_closed_once(fake: FakeDriver) -> None:
    streams, events = Streams(), Events()
    assert [stream.name for stream in streams] == ["main", "side", "copy", "inbound", "outbound"]
    assert len({int(stream) for stream in streams}) == 5
    names = [event.name for event in events]
    assert {"lora_ready", "gemm2_done"} <= set(names)
    assert all(getattr(events, name).name == name for name in names)
    made = len(fake.events)
    events.lora_ready.record(streams.side)
    streams.main.wait(events.lora_ready)
    assert len(fake.events) == made == len(names)
    for _ in range(2):
        streams.close()
        events.close()
    assert not fake.streams
    assert not fake.events
