"""A CUDA driver of plain Python: memory is host memory, work runs at once, captures build a graph as CUDA documents."""

# ruff: noqa: ARG002 (the signatures are the driver's)

import ctypes
from typing import Any

import pytest

from fake_batches import FakeBatches
from fake_host_memory import FakeHostMemory
from moelet.graphs.driver import driver


class FakeStream:
    def __init__(self) -> None:
        self.capturing = False
        self.tips: set[int] = set()  # what the next node depends on
        self.last: int | None = None


class FakeDriver(FakeBatches, FakeHostMemory):
    """Install with ``install``; ``launches`` are the packed arguments seen, ``calls`` the names of all calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.allocations: dict[int, Any] = {}
        self.locked: dict[int, int] = {}
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, set[int] | None] = {}
        self.nodes: list[str] = []
        self.edges: list[tuple[int, int, bool]] = []
        self.launches: list[tuple[int, bytes]] = []
        self.parameter_sizes: list[int] = []
        self.capability = (9, 0)
        self.device_count = 1
        self.version = 13000
        self.next_handle = 0x1000

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeDriver":
        for name in dir(self):
            if name.startswith("cu"):
                monkeypatch.setattr(driver, name, self.logged(name))
        return self

    def logged(self, name: str) -> Any:
        method = getattr(self, name)

        def logged_call(*args: Any) -> Any:
            self.calls.append(name)
            return method(*args)

        logged_call.__name__ = name
        return logged_call

    def handle(self) -> int:
        self.next_handle += 16
        return self.next_handle

    # --- device -------------------------------------------------------------------------------------------------
    def cuInit(self, flags):
        return (driver.CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self):
        return ok(self.version)

    def cuDeviceGetCount(self):
        return ok(self.device_count)

    def cuDeviceGet(self, ordinal):
        return ok(driver.CUdevice(ordinal))

    def cuDeviceGetName(self, length, device):
        return ok(b"Fake H200".ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, which, device):
        values = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "L2_CACHE_SIZE": 62914560,
        }
        return ok(values[which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")])

    def cuDeviceTotalMem(self, device):
        return ok(1 << 37)

    def cuDevicePrimaryCtxRetain(self, device):
        return ok(driver.CUcontext(0x77))

    def cuDevicePrimaryCtxRelease(self, device):
        return ok()

    def cuCtxSetCurrent(self, context):
        return ok()

    def cuMemGetInfo(self):
        return ok(1 << 36, 1 << 37)

    def cuGetErrorString(self, code):
        return ok(b"what the driver says of it")

    # --- memory -------------------------------------------------------------------------------------------------
    def cuMemAlloc(self, num_bytes):
        storage = (ctypes.c_uint8 * (num_bytes + 2048))()
        # 256-byte aligned and no better, as the driver promises
        address = -(-ctypes.addressof(storage) // 1024) * 1024 + 256
        self.allocations[address] = storage
        return ok(driver.CUdeviceptr(address))

    def cuMemFree(self, address):
        del self.allocations[int(address)]
        return ok()

    def cuMemcpyHtoD(self, target, source, num_bytes):
        ctypes.memmove(int(target), int(source), num_bytes)
        return ok()

    cuMemcpyDtoH = cuMemcpyHtoD

    def cuMemcpyHtoDAsync(self, target, source, num_bytes, stream):
        if not self.captured(stream, "MEMCPY"):
            ctypes.memmove(int(target), int(source), num_bytes)
        return ok()

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync
    cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def cuMemcpy2DAsync(self, copy, stream):
        for row in range(copy.Height):
            source, target = copy.srcHost + row * copy.srcPitch, int(copy.dstDevice) + row * copy.dstPitch
            ctypes.memmove(target, source, copy.WidthInBytes)
        return ok()

    def cuMemsetD8Async(self, target, byte, num_bytes, stream):
        if not self.captured(stream, "MEMSET"):
            ctypes.memset(int(target), byte, num_bytes)
        return ok()

    # --- streams and events -------------------------------------------------------------------------------------
    def cuStreamCreate(self, flags):
        handle = self.handle()
        self.streams[handle] = FakeStream()
        return ok(driver.CUstream(handle))

    def cuStreamDestroy(self, stream):
        del self.streams[int(stream)]
        return ok()

    def cuStreamSynchronize(self, stream):
        return ok()

    def cuStreamIsCapturing(self, stream):
        return ok(int(self.streams[int(stream)].capturing))

    def cuEventCreate(self, flags):
        handle = self.handle()
        self.events[handle] = None
        return ok(driver.CUevent(handle))

    def cuEventDestroy(self, event):
        del self.events[int(event)]
        return ok()

    def cuEventSynchronize(self, event):
        return ok()

    def cuEventRecord(self, event, stream):
        source = self.streams[int(stream)]
        self.events[int(event)] = set(source.tips) if source.capturing else None
        return ok()

    def cuStreamWaitEvent(self, stream, event, flags):
        target, tips = self.streams[int(stream)], self.events[int(event)]
        if tips is None:
            return (driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,) if target.capturing else ok()
        target.capturing = True
        target.tips |= tips
        return ok()

    # --- kernels ------------------------------------------------------------------------------------------------
    def cuModuleLoadData(self, image):
        return ok(driver.CUmodule(0x99))

    def cuModuleUnload(self, module):
        return ok()

    def cuModuleGetFunction(self, module, name):
        return ok(driver.CUfunction(0x98))

    def cuFuncSetAttribute(self, function, attribute, value):
        return ok()

    def cuFuncLoad(self, function):
        return ok()

    def cuFuncGetParamInfo(self, function, index):
        if index >= len(self.parameter_sizes):
            return (driver.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)
        return ok(0, self.parameter_sizes[index])

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        pointers = (ctypes.c_void_p * max(len(self.parameter_sizes), 1)).from_address(parameters)
        values = [ctypes.string_at(pointers[i], size) for i, size in enumerate(self.parameter_sizes)]
        self.launches.append((int(config.hStream), b"".join(values)))
        self.captured(config.hStream, "KERNEL", programmatic=config.numAttrs == 1)
        return ok()

    # --- graphs -------------------------------------------------------------------------------------------------
    def captured(self, stream, kind, programmatic=False) -> bool:
        source = self.streams[int(stream)]
        if not source.capturing:
            return False
        node = len(self.nodes)
        self.nodes.append(kind)
        for tip in sorted(source.tips):
            early = programmatic and tip == source.last and self.nodes[tip] == "KERNEL"
            self.edges.append((tip, node, early))
        source.tips, source.last = {node}, node
        return True

    def cuStreamBeginCapture(self, stream, mode):
        self.nodes, self.edges = [], []
        self.streams[int(stream)].capturing = True
        return ok()

    def cuStreamGetCaptureInfo(self, stream):
        source = self.streams[int(stream)]
        status = driver.CUstreamCaptureStatus(int(source.capturing))
        return ok(status, 1, None, [node_handle(tip) for tip in source.tips], [], len(source.tips))

    def cuStreamEndCapture(self, stream):
        reached = set(self.streams[int(stream)].tips)
        for source, target, _ in reversed(self.edges):
            if target in reached:
                reached.add(source)
        joined = all(s.tips <= reached for s in self.streams.values() if s.capturing)
        for source in self.streams.values():
            source.capturing, source.tips, source.last = False, set(), None
        if not joined:
            return (driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None)
        return ok(driver.CUgraph(0x40))

    def cuGraphGetNodes(self, graph, count):
        return ok([node_handle(i) for i in range(len(self.nodes))][:count], len(self.nodes))

    def cuGraphNodeGetType(self, node):
        return ok(getattr(driver.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{self.nodes[int(node) - 0x500]}"))

    def cuGraphGetEdges(self, graph, capacity):
        given = self.edges[:capacity]
        empty = [driver.CUgraphNode(0)] * (capacity - len(given))
        data = [edge_data(early) for _, _, early in given] + [driver.CUgraphEdgeData() for _ in empty]
        sources = [node_handle(source) for source, _, _ in given] + empty
        targets = [node_handle(target) for _, target, _ in given] + empty
        return ok(sources, targets, data, len(given))

    def cuGraphInstantiate(self, graph, flags):
        return ok(driver.CUgraphExec(0x60))

    def cuGraphUpload(self, executable, stream):
        return ok()

    def cuGraphLaunch(self, executable, stream):
        return ok()

    def cuGraphDestroy(self, graph):
        return ok()

    cuGraphExecDestroy = cuGraphDestroy


def ok(*values: Any) -> tuple[Any, ...]:
    return (driver.CUresult.CUDA_SUCCESS, *values)


def node_handle(index: int) -> Any:
    return driver.CUgraphNode(0x500 + index)


def edge_data(programmatic: bool) -> Any:
    data = driver.CUgraphEdgeData()
    data.type, data.from_port = int(programmatic), int(programmatic)
    return data
