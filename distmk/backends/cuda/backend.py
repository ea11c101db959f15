"""The cuda backend: a GPU's memory, and the kernel made ready for it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk import env
from distmk.abi import Abort, Space
from distmk.backends.base import LaunchBlock, LaunchSpec, refuse_what_others_have
from distmk.backends.cuda.build import architecture_of, build_cubin
from distmk.backends.cuda.gpus import gpu_of, num_sharing, num_sms_of
from distmk.backends.cuda.launch import CudaLaunch
from distmk.backends.cuda.nvshmem import SPARE_BYTES, SymmetricHeap, require
from distmk.backends.host.shm import SharedHeap
from distmk.bootstrap import Bootstrap, agree
from distmk.errors import BuildError, DistmkError, UsageError
from distmk.program.layout import Placed
from distmk.program.program import RankProgram

KERNEL = b"distmk_megakernel"
OTHER_BYTES = 1 << 30  # of a GPU's memory: contexts, the program, tokens


class CudaBackend:
    """Implements `backend.Backend`. Collective; UsageError or BuildError on every rank where it cannot be made."""

    name = "cuda"
    device = "cuda"

    def __init__(self, program: RankProgram, bootstrap: Bootstrap, scheduler_threads: bool = False) -> None:
        self.program, self._bootstrap, self.scheduler_threads = program, bootstrap, scheduler_threads
        agree(bootstrap, require)
        self._device = agree(bootstrap, self._open_device)
        self._module = agree(bootstrap, self._load)
        self._liveness = SharedHeap(bootstrap, 4096)  # its lock tells who is alive
        self._heap = SymmetricHeap(bootstrap, self._device, self._module, program.header.heap_bytes)
        self._closed = False
        try:
            agree(bootstrap, self._allocate)
        except DistmkError:
            self.close()  # on every rank alike
            raise

    def _open_device(self) -> Any:
        import torch
        from cuda.core import Device

        gpu = gpu_of(self._bootstrap.local_rank)
        refuse_what_others_have(self.name)
        torch.cuda.set_device(gpu)
        device = Device(gpu)
        device.set_current()
        self._check_room()
        return device

    def _check_room(self) -> None:
        import torch

        header = self.program.header
        needed, (free, _) = header.local_bytes + header.heap_bytes + SPARE_BYTES, torch.cuda.mem_get_info()
        free //= num_sharing(self._bootstrap.local_size)
        if needed + OTHER_BYTES > free:
            raise UsageError(
                f"weights, KV cache and heap need {needed / 1e9:.1f} GB, the GPU has {free / 1e9:.1f} GB free; "
                "use more ranks, a lower --max-model-len or a lower --max-num-seqs"
            )

    def _load(self) -> Any:
        from cuda.core import ObjectCode

        return ObjectCode.from_cubin(build_cubin(architecture_of(self._device.compute_capability)).read_bytes())

    def _allocate(self) -> None:
        import torch

        self._local = torch.zeros(self.program.header.local_bytes, dtype=torch.uint8, device="cuda")
        self._bytes = torch.frombuffer(bytearray(self.program.to_bytes()), dtype=torch.uint8).cuda()
        self._bases = torch.tensor(self._heap.bases, dtype=torch.int64).cuda()
        self._faults_seen = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._stream, self._side = self._device.create_stream(), torch.cuda.Stream()
        self._flag = torch.zeros(1, dtype=torch.int64).pin_memory()  # allocating it beside a kernel could wait for it
        self._kernel = self._module.get_kernel(KERNEL)
        self._make_resident()
        self._block_takers = torch.zeros(self.grid, dtype=torch.int64, device="cuda")
        self.num_launches = 0

    def _make_resident(self) -> None:
        """UsageError unless all of the grid's blocks can be on the GPU at once, which the protocol relies on.

        A cooperative launch holds them there. Without one, other work may get the GPU between the kernels of two
        iterations, and blocks that find no room wait for the others, which leave at the deadline.
        """
        from cuda.bindings import driver

        properties, handle, attribute = self._device.properties, self._kernel.handle, driver.CUfunction_attribute

        def known(which: Any) -> int:
            error, value = driver.cuKernelGetAttribute(which, handle, self._device.device_id)
            return int(value) if error == driver.CUresult.CUDA_SUCCESS else 0

        # A worker has an SM to itself, and all of its shared memory.
        static_bytes = known(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        shared_bytes = properties.max_shared_memory_per_block_optin - static_bytes
        threads = known(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        num_registers = known(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(dynamic, shared_bytes, handle, self._device.device_id)
        blocks = 0
        if error == driver.CUresult.CUDA_SUCCESS:
            blocks = self._kernel.occupancy.max_active_blocks_per_multiprocessor(threads, shared_bytes)
        header = self.program.header
        self.launch_iterations = env.launch_iterations() or int(not properties.cooperative_launch)  # 0: all
        wanted = header.num_workers + int(self.scheduler_threads)
        room = min(blocks, 1) * num_sms_of(self._bootstrap.local_rank)
        if wanted > room:
            raise UsageError(
                f"the kernel needs {wanted} blocks of {threads} threads, {num_registers} registers and "
                f"{shared_bytes} bytes of shared memory at once; this rank's GPU has room for {room}; use fewer workers"
            )
        self.grid, self.threads, self.shared_bytes = wanted, threads, shared_bytes

    def _piece(self, placed: Placed) -> Any:
        memory = self._heap.tensor if placed.space is Space.HEAP else self._local
        return memory[placed.offset : placed.offset + placed.num_bytes]

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        flat: npt.NDArray[Any] = self._piece(placed).cpu().numpy().view(dtype)
        return flat.reshape(placed.rows, -1)

    def write(self, placed: Placed, row: int, array: Any) -> None:
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else array
        raw = tensor.reshape(-1).view(torch.uint8)
        begin = row * placed.row_bytes
        self._piece(placed)[begin : begin + raw.numel()].copy_(raw)

    def reset(self) -> None:
        import torch

        _zero(self._heap.tensor, self.program.header.zeroed_heap_bytes)
        _zero(self._faults_seen, self._faults_seen.nbytes)
        torch.cuda.synchronize()

    def start(self, spec: LaunchSpec) -> CudaLaunch:
        return CudaLaunch(self, LaunchBlock.of(spec, self.program))

    def abort(self, reason: Abort) -> None:
        """Tells this rank's kernel, which tells the others."""
        import torch

        self._flag[0] = int(reason)
        # A GPU that has failed needs no telling; join() says what became of it.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._side):
            self._heap.tensor[:8].copy_(self._flag.view(torch.uint8), non_blocking=True)
            self._side.synchronize()

    def abort_reason(self) -> Abort:
        return Abort(int.from_bytes(self._heap.tensor[:8].cpu().numpy().tobytes(), "little"))

    def read_global(self, name: str, num_bytes: int) -> bytes:
        """A global variable of the kernel; BuildError where it was compiled without."""
        from cuda.bindings import driver

        error, where, size = driver.cuLibraryGetGlobal(self._module.handle, name.encode())
        if error != driver.CUresult.CUDA_SUCCESS or size < num_bytes:
            raise BuildError(f"the kernel has no {num_bytes} bytes named {name}; was it compiled with other flags?")
        found = np.empty(num_bytes, np.uint8)
        (error,) = driver.cuMemcpyDtoH(found.ctypes.data, where, num_bytes)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise BuildError(f"{name} cannot be read from the GPU: {error.name}")
        return found.tobytes()

    def lost_ranks(self) -> list[int]:
        return self._liveness.lost_ranks()

    def close(self) -> None:
        """Leave NVSHMEM together with the other ranks; if one of them is gone, it would wait for that one for ever."""
        if self._closed:
            return
        self._closed = True
        if self._liveness.leave_together(self._bootstrap.timeout_s):
            self._heap.close()
        else:
            self._heap.abandon()
        self._liveness.close()


def _zero(tensor: Any, num_bytes: int) -> None:
    """By a memset: a tensor's zero_() would launch a kernel of its own."""
    from cuda.bindings import driver

    (error,) = driver.cuMemsetD8(tensor.data_ptr(), 0, num_bytes)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuMemsetD8: {error}")
