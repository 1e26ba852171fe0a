"""Kernels loaded from cubins, and launches of them with everything that a launch needs prepared beforehand."""

from collections.abc import Mapping
from typing import Any

from ..layer.errors import EngineError
from .arguments import Argument, ArgumentBlock
from .compiler import Cubin
from .driver import call, check, driver, failure
from .hazards import Work
from .streams import Stream

Dim3 = tuple[int, int, int]

DEFAULT_SHARED_BYTES = 48 * 1024
"""The shared memory of a block that needs no asking for."""


class PreparedLaunch:
    """One kernel with its grid, stream and arguments ready, so that launching it costs one driver call.

    ``work`` declares the buffers it touches by name, and whether it waits for its programmatic predecessors.
    """

    __slots__ = (
        "_address",
        "_config",
        "_function",
        "_launch",
        "arguments",
        "kernel",
        "stream",
        "work",
    )

    def __init__(self, kernel: "Kernel", config: Any, arguments: ArgumentBlock, stream: Stream, work: Work) -> None:
        self.kernel = kernel
        self.arguments = arguments
        self.stream = stream
        self.work = work
        self._config = config
        self._address = arguments.address
        self._function = kernel.function
        self._launch = driver.cuLaunchKernelEx

    @property
    def label(self) -> str:
        """What people call the launch."""
        return self.work.label

    @property
    def reads(self) -> frozenset[str]:
        """Names of the buffers it reads."""
        return self.work.reads

    @property
    def writes(self) -> frozenset[str]:
        """Names of the buffers it writes."""
        return self.work.writes

    @property
    def waits(self) -> bool:
        """Whether the kernel executes ``griddepcontrol.wait``."""
        return self.work.waits

    def launch(self) -> None:
        """Put the kernel on its stream. Raises ``DriverError``, or ``EngineFailedError`` once the device has failed."""
        code = self._launch(self._config, self._function, self._address, 0)[0]
        if code != 0:
            raise failure(code, f"cuLaunchKernelEx of {self.label}")
        if self.stream.tracer is not None:
            self.stream.tracer(self.work)

    def set(self, name: str, value: int | float) -> None:
        """Change one argument of later launches; a captured one keeps its own."""
        self.arguments.set(name, value)


class Kernel:
    """A kernel loaded onto the current device.

    ``dynamic_shared_bytes`` is the most that any of its launches will ask for; above 48 KiB the function is told of
    it here, for that cannot happen in a capture. Raises ``DriverError``.
    """

    def __init__(self, cubin: Cubin, dynamic_shared_bytes: int = 0) -> None:
        self.cubin = cubin
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self._module = call(driver.cuModuleLoadData, cubin.image)
        self.function = call(driver.cuModuleGetFunction, self._module, cubin.kernel.encode())
        if dynamic_shared_bytes + cubin.resources.shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, self.function, attribute, dynamic_shared_bytes)
        call(driver.cuFuncLoad, self.function)  # lazy loading would otherwise strike inside a capture
        self.parameter_sizes = self._read_parameter_sizes()

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.cubin.kernel

    def prepare(
        self,
        *,
        grid: Dim3,
        block: Dim3,
        stream: Stream,
        arguments: Mapping[str, Argument],
        waits: bool,
        reads: frozenset[str] = frozenset(),
        writes: frozenset[str] = frozenset(),
        early: frozenset[str] = frozenset(),
        holds: bool = False,
        dynamic_shared_bytes: int = 0,
        programmatic: bool = False,
        label: str = "",
    ) -> PreparedLaunch:
        """A launch of this kernel, its ``arguments`` in the order of the parameters.

        ``reads`` and ``writes`` name every buffer that it touches and that anything else in a graph touches too.
        ``early`` and ``holds`` are as in ``Work``. ``programmatic`` lets it start before its predecessor on the stream
        has ended, which only a kernel that ``waits`` may. Raises ``EngineError`` where arguments and parameters, or
        sizes, do not agree.
        """
        packed = ArgumentBlock(arguments)
        if packed.sizes != self.parameter_sizes:
            raise EngineError(
                f"kernel {self.name} takes parameters of {self.parameter_sizes} bytes, "
                f"but the arguments {', '.join(arguments)} have {packed.sizes}"
            )
        if dynamic_shared_bytes > self.dynamic_shared_bytes:
            raise EngineError(
                f"kernel {self.name} was loaded for {self.dynamic_shared_bytes} bytes of dynamic shared memory, "
                f"got {dynamic_shared_bytes}"
            )
        if programmatic and not waits:
            raise EngineError(
                f"kernel {self.name} does not wait for its predecessor, so it may not start before its end"
            )
        config = _config(grid, block, dynamic_shared_bytes, stream, programmatic)
        work = Work(label or self.name, frozenset(reads), frozenset(writes), waits, frozenset(early), holds)
        return PreparedLaunch(self, config, packed, stream, work)

    def close(self) -> None:
        """Unload the kernel; its launches, and graphs that hold them, must be gone. A second call does nothing."""
        if self._module is not None:
            call(driver.cuModuleUnload, self._module)
            self._module = None

    def _read_parameter_sizes(self) -> list[int]:
        sizes: list[int] = []
        while True:
            result = driver.cuFuncGetParamInfo(self.function, len(sizes))
            if result[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # one past the last
                return sizes
            sizes.append(int(check(result, "cuFuncGetParamInfo")[1]))


def _config(grid: Dim3, block: Dim3, shared_bytes: int, stream: Stream, programmatic: bool) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = stream.handle
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config
