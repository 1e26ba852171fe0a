"""The CUDA driver: every call checked and every error explained, and the device the process runs on.

Importing this file needs neither a GPU nor a driver, nor even the bindings; the first call does.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..layer.errors import DeviceUnavailableError, EngineError, EngineFailedError

USE_CPU = "to serve without a GPU, use --device cpu"

ARCHITECTURES = {(9, 0): "sm_90a"}
"""Compute capability to the architecture that kernels are compiled for: one line for each GPU family served."""

CAUSES = {
    "CUDA_ERROR_INVALID_VALUE": "an argument is outside what the call accepts (a null or freed pointer, a zero size)",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has no room left: other processes may be using it, or slots and weights "
    "together are larger than its memory",
    "CUDA_ERROR_INVALID_CONTEXT": "the calling thread has not made the device current, or the device was closed",
    "CUDA_ERROR_INVALID_HANDLE": "a stream, event, graph or module was used after it was closed",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin was compiled for another architecture than this GPU's",
    "CUDA_ERROR_INVALID_IMAGE": "the cubin is damaged, or was compiled by a CUDA that is newer than the driver",
    "CUDA_ERROR_INVALID_PTX": "the driver is older than the CUDA that compiled the kernel",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the CUDA that compiled the kernel",
    "CUDA_ERROR_NOT_FOUND": 'the name is not in the module (a kernel is not declared extern "C", or was renamed)',
    "CUDA_ERROR_NOT_READY": "the work asked about is still running",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "a block asks for more registers, shared memory or threads than an SM has",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote outside its buffers, or used one after it was freed",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel made a vector or bulk access at an address that is not aligned for it",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel met an instruction that the GPU refuses (often a bad descriptor)",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel faulted while it ran (often a bad barrier or shared memory address)",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the driver allows, often a barrier that nobody arrives at",
    "CUDA_ERROR_ASSERT": "a device-side assertion failed",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory has a fault that it could not correct",
    "CUDA_ERROR_NOT_PERMITTED": "the call is not allowed now, usually because a stream is being captured",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver does not offer the call",
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER": "the NVIDIA driver is too old for the call",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's kernel module and library are of different versions",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "the operation cannot be captured (an allocation, a module load, "
    "a synchronous copy)",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier operation inside the capture was not allowed",
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": "an event joined two captures that have nothing to do with each other",
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": "the capture was ended on another stream than the one that began it",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a side stream was forked into the capture and never joined back",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "a captured stream waited for an event that was recorded before the capture",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "something used the legacy default stream while another stream was capturing",
    "CUDA_ERROR_CAPTURED_EVENT": "an event that was recorded inside a capture was queried or waited for outside it",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "the capture was ended from another thread than the one that began it",
}
"""What usually causes an error, for those a person is likely to meet."""

STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    }
)
"""Errors that leave the context unusable: every later call fails too, and only a new process recovers."""


class DriverError(EngineError):
    """A driver call failed; ``call`` names it and ``error`` is the driver's name of the failure."""

    def __init__(self, message: str, call: str, error: str) -> None:
        super().__init__(message)
        self.call = call
        self.error = error


class _NoBindings:
    """Stands where the bindings would, so that only using them fails."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DeviceUnavailableError(f"the Python package cuda-bindings is not installed; {USE_CPU}")


def bindings(module: str) -> Any:
    """``cuda.bindings.<module>``, or a stand-in that raises ``DeviceUnavailableError`` once it is used."""
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError:
        return _NoBindings()


driver = bindings("driver")


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Run one driver call and return what it gives: None, one value, or a tuple of several.

    Raises ``EngineFailedError`` for an error that only a new process recovers from, else ``DriverError``.
    """
    return check(function(*args), function.__name__)


def check(result: tuple[Any, ...], call_name: str) -> Any:
    """The values of a driver call's ``result`` tuple; raises as ``call`` does."""
    if result[0] != 0:
        raise failure(result[0], call_name)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def failure(code: Any, call_name: str) -> EngineError:
    """The exception for error ``code`` of ``call_name``, with what usually causes it."""
    name = getattr(code, "name", None) or str(int(code))
    text = _error_string(code)
    message = f"{call_name} failed with {name} ({int(code)}{f': {text}' if text else ''})"
    if name in CAUSES:
        message += f"; usually {CAUSES[name]}"
    if name in STICKY:
        return EngineFailedError(f"{message}; the process must be restarted")
    return DriverError(message, call_name, name)


def _error_string(code: Any) -> str:
    try:
        error, text = driver.cuGetErrorString(code)
    except (RuntimeError, TypeError):  # no driver library; a code that these bindings do not know
        return ""
    return text.decode() if error == 0 and text else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU and its primary context, which torch shares.

    ``max_shared_memory`` is what one block may opt in to; it, ``l2_bytes`` and ``total_memory`` are bytes.
    ``driver_version`` is the CUDA version that the driver supports, such as ``(13, 0)``.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    max_shared_memory: int
    l2_bytes: int
    total_memory: int
    driver_version: tuple[int, int]
    context: Any

    @property
    def arch(self) -> str:
        """The architecture to compile for, ``"sm_90a"``."""
        return ARCHITECTURES[self.compute_capability]

    def make_current(self) -> None:
        """Let the calling thread use the device; a thread calls this once or more often, at little cost."""
        code = driver.cuCtxSetCurrent(self.context)[0]
        if code != 0:
            raise failure(code, "cuCtxSetCurrent")

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        call(driver.cuCtxSynchronize)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of GPU memory."""
        free, total = call(driver.cuMemGetInfo)
        return int(free), int(total)

    def close(self) -> None:
        """Release the primary context; it lives on while something else, such as torch, holds it."""
        call(driver.cuDevicePrimaryCtxRelease, self.ordinal)


def open_device(ordinal: int = 0) -> Device:
    """Retain the primary context of GPU ``ordinal`` and make it current in this thread.

    Raises ``DeviceUnavailableError``: no driver, no such GPU, or no kernels for its compute capability.
    """
    _initialize()
    count = call(driver.cuDeviceGetCount)
    if not 0 <= ordinal < count:
        raise DeviceUnavailableError(f"there is no GPU {ordinal}: the driver shows {count} of them; {USE_CPU}")
    handle = call(driver.cuDeviceGet, ordinal)
    name = call(driver.cuDeviceGetName, 128, handle).split(b"\0")[0].decode()
    capability = (_attribute(handle, "COMPUTE_CAPABILITY_MAJOR"), _attribute(handle, "COMPUTE_CAPABILITY_MINOR"))
    _check_capability(name, capability)
    context = call(driver.cuDevicePrimaryCtxRetain, handle)
    device = Device(
        ordinal=ordinal,
        name=name,
        compute_capability=capability,
        sm_count=_attribute(handle, "MULTIPROCESSOR_COUNT"),
        max_shared_memory=_attribute(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=_attribute(handle, "L2_CACHE_SIZE"),
        total_memory=int(call(driver.cuDeviceTotalMem, handle)),
        driver_version=_version(call(driver.cuDriverGetVersion)),
        context=context,
    )
    device.make_current()
    return device


def _initialize() -> None:
    try:
        result = driver.cuInit(0)
    except RuntimeError:  # the bindings raise their own kind of it where libcuda cannot be loaded
        raise DeviceUnavailableError(f"no NVIDIA driver was found on this machine; {USE_CPU}") from None
    try:
        check(result, "cuInit")
    except EngineError as error:
        raise DeviceUnavailableError(f"no GPU can be used: {error}; {USE_CPU}") from error


def _check_capability(name: str, capability: tuple[int, int]) -> None:
    if capability in ARCHITECTURES:
        return
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < min(ARCHITECTURES):
        raise DeviceUnavailableError(f"{found}, and the kernels need 9.0 (Hopper) or above; {USE_CPU}")
    served = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
    raise DeviceUnavailableError(f"{found}, for which there are no kernels yet (there are for {served}); {USE_CPU}")


def _attribute(handle: Any, name: str) -> int:
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(driver.cuDeviceGetAttribute, which, handle))


def _version(encoded: int) -> tuple[int, int]:
    return encoded // 1000, encoded % 1000 // 10
