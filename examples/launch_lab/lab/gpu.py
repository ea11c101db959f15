"""A GPU as the rungs use it, on top of cuda-python: one context, one stream, kernels by name, memory, graphs.

All work is ordered by the one non-blocking stream. Memory is freed at the latest by `close`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.errors import UsageError
from lab.errors import LabError
from lab.kernels import architecture_for, build

NUM_THREADS = 256  # per block, in all rungs


def why_no_gpu() -> str | None:
    """Why the lab cannot use a GPU here; None if it can."""
    try:
        from cuda.bindings import driver
    except ImportError:
        # On a machine with a GPU the missing part is the package.
        has_gpu = Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()
        return "no cuda-python; pip install 'distmk[cuda]'" if has_gpu else "no NVIDIA GPU on this machine"
    try:
        call(driver.cuInit(0))
        count = int(call(driver.cuDeviceGetCount()))
    except (RuntimeError, LabError) as error:  # without a driver its library cannot be loaded
        return f"no NVIDIA GPU or no driver ({' '.join(str(error).split())})"
    return None if count else "the driver shows no GPU; look at CUDA_VISIBLE_DEVICES"


def call(result: tuple[Any, ...]) -> Any:
    """The value in a driver function's result, without its status. LabError: the call failed."""
    status, *values = result
    if int(status):
        raise LabError(f"the CUDA driver says {getattr(status, 'name', status)}")
    return values[0] if values else None


@dataclass(frozen=True)
class Memory:
    """An allocation in GPU memory."""

    address: int
    num_bytes: int


@dataclass(frozen=True)
class Words:
    """64-bit words of pinned host memory that kernels access too; `words[i]` is one load or one store."""

    address: int
    words: ctypes.Array[ctypes.c_uint64]


def _packed(argument: Any) -> Any:
    """A kernel argument: Memory, Words and None become pointers, int becomes uint32_t, a ctypes value stays as it is."""
    if isinstance(argument, (Memory, Words)):
        return ctypes.c_uint64(argument.address)
    if argument is None:
        return ctypes.c_uint64(0)
    return ctypes.c_uint32(argument) if isinstance(argument, int) else argument


class Launch:
    """A kernel with its arguments, launched by each call. A ctypes argument may change its value between calls."""

    def __init__(self, gpu: Gpu, kernel: Any, num_blocks: int, arguments: tuple[Any, ...], cooperative: bool) -> None:
        from cuda.bindings import driver

        self._values = [_packed(argument) for argument in arguments]  # read by the driver at each launch
        self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, self._values))
        sizes, more = (num_blocks, 1, 1, NUM_THREADS, 1, 1, 0), () if cooperative else (0,)
        self._arguments = (kernel, *sizes, gpu.stream, ctypes.addressof(self._pointers), *more)
        self._launch = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel

    def __call__(self) -> None:
        result = self._launch(*self._arguments)
        if result[0] != 0:
            call(result)


def pci_bus_id(index: int) -> str:
    """PCI bus id of visible GPU `index`, by which NVML identifies it."""
    from cuda.bindings import driver

    call(driver.cuInit(0))
    return str(call(driver.cuDeviceGetPCIBusId(32, call(driver.cuDeviceGet(index)))).split(b"\0")[0].decode())


class Gpu:
    """Visible GPU `index`. UsageError: there is no such GPU, or it is too old."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._driver, self.index = driver, index
        call(driver.cuInit(0))
        count = int(call(driver.cuDeviceGetCount()))
        if not 0 <= index < count:
            raise UsageError(f"--gpu {index}: there is no such GPU; {count} are visible here, counted from 0")
        self._device = call(driver.cuDeviceGet(index))
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.architecture = architecture_for((major, minor))
        self.num_sms = self.attribute("MULTIPROCESSOR_COUNT")
        self.cooperative = bool(self.attribute("COOPERATIVE_LAUNCH"))
        call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(self._device))))
        self.stream = call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._kernels: dict[tuple[str, str], Any] = {}
        self._modules: dict[str, tuple[Any, bytes]] = {}
        self._memory: list[int] = []
        self._pinned: list[int] = []
        self._graphs: list[Any] = []

    def attribute(self, name: str) -> int:
        """A device attribute; `name` is without the prefix CU_DEVICE_ATTRIBUTE_."""
        kind = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self._driver.cuDeviceGetAttribute(kind, self._device)))

    @property
    def name(self) -> str:
        return str(call(self._driver.cuDeviceGetName(100, self._device)).split(b"\0")[0].decode())

    @property
    def bus_id(self) -> str:
        return pci_bus_id(self.index)

    @property
    def driver_cuda(self) -> str:
        """The CUDA version of the driver, such as 13.0."""
        version = int(call(self._driver.cuDriverGetVersion()))
        return f"{version // 1000}.{version % 1000 // 10}"

    # Kernels

    def kernel(self, source: str, name: str) -> Any:
        """Kernel `name` in `source`, a file of the rungs, compiled and loaded once. BuildError: it does not compile."""
        if (source, name) not in self._kernels:
            if source not in self._modules:
                image = build(source, self.architecture).read_bytes()
                self._modules[source] = call(self._driver.cuModuleLoadData(image)), image
            module, _ = self._modules[source]
            self._kernels[source, name] = call(self._driver.cuModuleGetFunction(module, name.encode()))
        return self._kernels[source, name]

    def launch(self, kernel: Any, num_blocks: int, *arguments: Any, cooperative: bool = False) -> Launch:
        """A launch of `num_blocks` blocks, to be called. `cooperative`: all blocks are resident at once, or it fails."""
        return Launch(self, kernel, num_blocks, arguments, cooperative)

    def num_resident(self, kernel: Any) -> int:
        """Blocks of the kernel that are resident on the whole GPU at once."""
        per_sm = call(self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, NUM_THREADS, 0))
        return int(per_sm) * self.num_sms

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `enqueue` as a graph; each call of the result replays it."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture(self.stream, mode))
        try:
            enqueue()
        finally:
            captured = driver.cuStreamEndCapture(self.stream)
        graph = call(captured)
        replayed = call(driver.cuGraphInstantiate(graph, 0))
        call(driver.cuGraphDestroy(graph))
        self._graphs.append(replayed)
        call(driver.cuGraphUpload(replayed, self.stream))
        launch, stream = driver.cuGraphLaunch, self.stream

        def replay() -> None:
            call(launch(replayed, stream))

        return replay

    def synchronize(self) -> None:
        """Wait for all enqueued work. LabError: some of it failed."""
        call(self._driver.cuStreamSynchronize(self.stream))

    def is_idle(self) -> bool:
        """Whether all enqueued work is done. LabError: some of it failed."""
        status = self._driver.cuStreamQuery(self.stream)
        if status[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call(status)
        return True

    # Memory

    def empty(self, num_bytes: int) -> Memory:
        address = int(call(self._driver.cuMemAlloc(num_bytes)))
        self._memory.append(address)
        return Memory(address, num_bytes)

    def free(self, memory: Memory) -> None:
        """Wait for all enqueued work, then free the memory."""
        self.synchronize()
        self._memory.remove(memory.address)
        call(self._driver.cuMemFree(memory.address))

    def upload(self, array: npt.NDArray[Any]) -> Memory:
        """New GPU memory with a copy of `array`."""
        made = self.empty(array.nbytes)
        source = np.ascontiguousarray(array)
        call(self._driver.cuMemcpyHtoDAsync(made.address, source.ctypes.data, source.nbytes, self.stream))
        self.synchronize()  # the caller may free the array
        return made

    def download(self, memory: Memory, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The content of the memory after all enqueued work, as a flat array."""
        out = np.empty(memory.num_bytes // np.dtype(dtype).itemsize, dtype)
        call(self._driver.cuMemcpyDtoHAsync(out.ctypes.data, memory.address, out.nbytes, self.stream))
        self.synchronize()
        return out

    def copy(self, src: Memory, dst: Memory) -> None:
        """Enqueue a copy of `src` to the beginning of `dst`."""
        call(self._driver.cuMemcpyDtoDAsync(dst.address, src.address, src.num_bytes, self.stream))

    def send(self, src: Words, dst: Memory) -> None:
        """Enqueue a copy of `src`, in host memory, to the beginning of `dst`."""
        num_bytes = ctypes.sizeof(src.words)
        call(self._driver.cuMemcpyHtoDAsync(dst.address, src.address, num_bytes, self.stream))

    def fill(self, memory: Memory, byte: int = 0) -> None:
        """Enqueue setting every byte to `byte`."""
        call(self._driver.cuMemsetD8Async(memory.address, byte, memory.num_bytes, self.stream))

    def words(self, count: int) -> Words:
        """New words of pinned and mapped host memory, all 0. Not managed memory, so that no page migrates."""
        driver = self._driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(call(driver.cuMemHostAlloc(8 * count, flags)))
        self._pinned.append(address)
        ctypes.memset(address, 0, 8 * count)
        return Words(address, (ctypes.c_uint64 * count).from_address(address))

    def close(self) -> None:
        """Wait for all enqueued work (every kernel has a deadline or ends by itself), then release everything."""
        driver = self._driver
        driver.cuStreamSynchronize(self.stream)  # a failure here was raised by an earlier call
        for graph in self._graphs:
            driver.cuGraphExecDestroy(graph)
        for address in self._memory:
            driver.cuMemFree(address)
        for address in self._pinned:
            driver.cuMemFreeHost(address)
        for module, _ in self._modules.values():
            driver.cuModuleUnload(module)
        driver.cuStreamDestroy(self.stream)
        driver.cuDevicePrimaryCtxRelease(self._device)

    def __enter__(self) -> Gpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
