"""The cuda backend: a GPU's memory, and the launches of its kernel."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk import env
from distmk.abi import Abort, Space
from distmk.backends.base import check_virtual_nodes, first_batches
from distmk.backends.cuda.driver import DriverError, checked
from distmk.backends.cuda.gpus import OTHER_BYTES, gpu_of, num_sharing, num_sms_of
from distmk.backends.cuda.kernel import fit_kernel, load_module
from distmk.backends.cuda.launch import CudaLaunch, LaunchContext
from distmk.backends.cuda.nvshmem import SPARE_BYTES, SymmetricHeap
from distmk.backends.cuda.packages import require_packages
from distmk.backends.host.shm import SharedHeap
from distmk.backends.launch_block import LaunchBlock
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.own_sources import require_bodies
from distmk.backends.tensors import typed
from distmk.bootstrap import Bootstrap, agree
from distmk.errors import BuildError, DistmkError, UsageError
from distmk.program.layout import Placed
from distmk.program.program import RankProgram

ABORT_BYTES = 8  # the abort flag at the start of the heap (abi.Control)


class CudaBackend:
    """Implements `base.Backend`. Collective; UsageError or BuildError on every rank if it cannot be constructed."""

    name = "cuda"
    device = "cuda"

    def __init__(
        self,
        program: RankProgram,
        bootstrap: Bootstrap,
        scheduler_threads: bool = False,
        others: Sequence[RankProgram] = (),
    ) -> None:
        self.program, self._others, self._bootstrap = program, others, bootstrap
        agree(bootstrap, require_packages)
        self._device = agree(bootstrap, self._open_device)
        self._module = agree(bootstrap, self._load_module)
        self._liveness = SharedHeap(bootstrap, 4096)  # each rank holds a lock on its own segment as long as it lives
        self._heap = SymmetricHeap(bootstrap, self._device, self._module, program.header.heap_bytes)
        self._closed = False
        self._launch: CudaLaunch | None = None
        try:
            self._context = agree(bootstrap, lambda: self._allocate(scheduler_threads))
        except DistmkError:
            self.close()  # every rank raises
            raise

    def _open_device(self) -> Any:
        import torch
        from cuda.core import Device

        gpu = gpu_of(self._bootstrap.local_rank)
        check_virtual_nodes(self.name)
        torch.cuda.set_device(gpu)
        device = Device(gpu)
        device.set_current()
        self._check_room()
        return device

    def _load_module(self) -> Any:
        programs = [self.program, *self._others]
        require_bodies(programs, "device", self.name)
        packed = any(each.has_packed_weights for each in programs)
        return load_module(self._device, self.program.own_types, packed)

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

    def _allocate(self, scheduler_threads: bool) -> LaunchContext:
        import torch

        header, device = self.program.header, self._device
        local = torch.zeros(header.local_bytes, dtype=torch.uint8, device="cuda")
        programs = [
            torch.frombuffer(bytearray(each.to_bytes()), dtype=torch.uint8).cuda()
            for each in (self.program, *self._others)
        ]
        bases = torch.tensor(self._heap.bases, dtype=torch.int64).cuda()
        faults_seen = torch.zeros(1, dtype=torch.int64, device="cuda")
        stream, self._side_stream = device.create_stream(), torch.cuda.Stream()
        # Pinned now, because allocating while a kernel runs could wait for the end of the kernel.
        self._flag = torch.zeros(1, dtype=torch.int64).pin_memory()
        grid = header.num_workers + int(scheduler_threads)
        kernel = fit_kernel(self._module, device, grid, num_sms_of(self._bootstrap.local_rank))
        return LaunchContext(
            rank=header.rank,
            kernel=kernel,
            stream=stream,
            side_stream=self._side_stream,
            programs=tuple(programs),
            program_table=torch.tensor([each.data_ptr() for each in programs], dtype=torch.int64).cuda(),
            heap_bases=bases,
            num_remote_ranks=self._heap.bases.count(0),
            local=local,
            faults_seen=faults_seen,
            worker_owners=torch.zeros(grid, dtype=torch.int64, device="cuda"),
            scheduler_threads=scheduler_threads,
            launch_iterations=env.launch_iterations() or int(not device.properties.cooperative_launch),
            launch_numbers=itertools.count(1),
        )

    def _bytes_of(self, placed: Placed) -> Any:
        memory = self._heap.tensor if placed.space is Space.HEAP else self._context.local
        return memory[placed.offset : placed.offset + placed.num_bytes]

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        copy: npt.NDArray[Any] = self._bytes_of(placed).cpu().numpy().view(dtype)
        copy.flags.writeable = False  # a write to a copy would be lost
        return copy.reshape(placed.rows, -1)

    def tensor(self, placed: Placed, dtype: str) -> Any:
        shared = typed(self._bytes_of(placed), placed, dtype)
        if placed.space is Space.HEAP:  # local memory is torch's, which lives as long as any tensor in it
            self._heap.lend(shared)
        return shared

    def write(self, placed: Placed, offset_bytes: int, array: Any) -> None:
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else array
        raw = tensor.reshape(-1).view(torch.uint8)
        self._bytes_of(placed)[offset_bytes : offset_bytes + raw.numel()].copy_(raw)

    def reset(self) -> None:
        import torch

        self._use_device()
        _zero(self._heap.tensor, self.program.header.zeroed_heap_bytes)
        for event in first_batches(self._others):
            self._heap.tensor[event] = 1  # the lowest byte of a counter
        _zero(self._context.faults_seen, self._context.faults_seen.nbytes)
        torch.cuda.synchronize()

    def _use_device(self) -> None:
        """Set the calling thread's GPU: any thread may launch."""
        import torch

        torch.cuda.set_device(self._device.device_id)
        self._device.set_current()

    def start(self, spec: LaunchSpec) -> CudaLaunch:
        self._use_device()
        # Stored before it starts, since the kernel uses its memory even if an exception reaches the caller.
        self._launch = CudaLaunch(self._context, self, LaunchBlock.of(spec, self.program, self._others))
        self._launch.start()
        return self._launch

    def join_all(self) -> None:
        with contextlib.suppress(Exception):  # the GPU may have failed; then the kernel is over
            self._context.stream.sync()

    def abort(self, reason: Abort) -> None:
        """Set the flag of this rank's kernel, which tells the other ranks."""
        import torch

        self._flag[0] = int(reason)
        # This raises if the GPU has failed. The kernel is then over, and join() reports the reason.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._side_stream):
            self._heap.tensor[:ABORT_BYTES].copy_(self._flag.view(torch.uint8), non_blocking=True)
            self._side_stream.synchronize()

    def abort_reason(self) -> Abort:
        return Abort(int.from_bytes(self._heap.tensor[:ABORT_BYTES].cpu().numpy().tobytes(), "little"))

    def read_global(self, name: str, num_bytes: int) -> bytes:
        """The contents of a global variable of the kernel.

        BuildError: the kernel was compiled without it, or it cannot be read.
        """
        from cuda.bindings import driver

        try:
            address, size = checked(driver.cuLibraryGetGlobal(self._module.handle, name.encode()))
        except DriverError:
            address, size = None, 0
        if size < num_bytes:
            raise BuildError(f"the kernel has no {num_bytes} bytes named {name}; was it compiled with other flags?")
        content = np.empty(num_bytes, np.uint8)
        try:
            checked(driver.cuMemcpyDtoH(content.ctypes.data, address, num_bytes))
        except DriverError as error:
            raise BuildError(f"{name} cannot be read from the GPU: {error}") from None
        return content.tobytes()

    def lost_ranks(self) -> list[int]:
        return self._liveness.lost_ranks()

    def close(self) -> None:
        """Leave NVSHMEM together with the other ranks.

        If one of them is gone, leave alone, because NVSHMEM would wait for it.
        """
        if self._closed:
            return
        self._closed = True
        if self._leaves_together():
            self._heap.close()
        else:
            self._heap.abandon()
        self._liveness.close()

    def _leaves_together(self) -> bool:
        """Whether all ranks close; waits for ranks of this host through shared memory, and for others over the bootstrap."""
        timeout_s = self._bootstrap.timeout_s
        together = self._liveness.leave_together(timeout_s)
        return self._bootstrap.meet("heap", timeout_s) and together if self._liveness.far_ranks else together


def _zero(tensor: Any, num_bytes: int) -> None:
    """Zero the first `num_bytes` by a memset. A tensor's zero_() would launch another kernel."""
    from cuda.bindings import driver

    checked(driver.cuMemsetD8(tensor.data_ptr(), 0, num_bytes))
