"""A launch of the kernel on a GPU: one for all iterations, or where blocks cannot be kept resident, one after another."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distmk.abi import Abort, LaunchParams
from distmk.backends.base import LaunchBlock, RunnerRecords, inject_dropped_signal

if TYPE_CHECKING:
    from distmk.backends.cuda.backend import CudaBackend

POLL_S = 0.0002
LOSS_S = 2.0  # from a failing GPU to the news of the rank whose end made it fail


class CudaLaunch:
    """Implements `backend.Launch`.

    A kernel that runs only some iterations is followed by another for the next ones from within `wait` and `join`: until
    they are called, this rank stands still, and after the deadline the others give up.
    """

    def __init__(self, backend: CudaBackend, block: LaunchBlock) -> None:
        self.block, self._backend = block, backend
        self._pinned = [_pin(memory) for memory in (block.tokens, block.token_count, block.records)]
        self._device = [_upload(memory) for memory in (block.requests, block.prompts, block.eos_ids)]
        self._params = _pin(LaunchParams())
        params = LaunchParams.from_address(self._params.data_ptr())
        block.fill(params)
        params.tokens, params.token_count, params.records = (tensor.data_ptr() for tensor in self._pinned)
        params.requests, params.prompts, params.eos_ids = (tensor.data_ptr() for tensor in self._device)
        params.program, params.heap_bases = backend._bytes.data_ptr(), backend._bases.data_ptr()
        params.local_base, params.faults_seen = backend._local.data_ptr(), backend._faults_seen.data_ptr()
        params.worker_owners = backend._block_takers.data_ptr()
        params.self, params.num_remote_ranks = self._params.data_ptr(), backend._heap.bases.count(0)
        params.spin_polls = 1 << 14
        self._trace = [_upload(memory) for memory in (block.trace, block.trace_counts) if block.trace.size]
        if self._trace:
            params.trace, params.trace_counts = (tensor.data_ptr() for tensor in self._trace)
        inject_dropped_signal(params.fault, backend.program.header.rank)
        # The host reads these while the kernel writes them.
        block.tokens = type(block.tokens).from_address(params.tokens)
        block.token_count = ctypes.c_uint64.from_address(params.token_count)
        block.records = type(block.records).from_address(params.records)
        self._filled = params
        params.scheduler_threads = int(backend.scheduler_threads)
        params.max_iterations = backend.launch_iterations
        self._start()

    def _start(self) -> None:
        from cuda.core import LaunchConfig, launch

        backend = self._backend
        config = LaunchConfig(
            grid=backend.grid,
            block=backend.threads,
            shmem_size=backend.shared_bytes,
            is_cooperative=not backend.launch_iterations,
        )
        backend.num_launches += 1
        self._filled.launch_number = backend.num_launches
        launch(backend._stream, config, backend._kernel, self._params.data_ptr())
        self._event = backend._stream.record()

    def _goes_on(self) -> bool:
        """Once the kernel has left: start the next one, if it left before the end."""
        params = self._filled
        if not params.max_iterations or params.iterations_done < params.first_iteration + params.max_iterations:
            return False  # it came to the end, or gave up
        if self._backend.abort_reason():
            return False
        params.first_iteration = params.iterations_done
        self._start()
        return True

    def wait(self, seen: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            if self._is_over():
                return True
            if self.block.token_count.value > seen or time.monotonic() >= until:
                return False
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        try:
            return bool(self._event.is_done) and not self._goes_on()
        except Exception:  # the GPU has failed: join() says why
            return True

    def join(self) -> Abort:
        try:
            while True:
                self._backend._stream.sync()
                if not self._goes_on():
                    return self._backend.abort_reason()
        except Exception:  # of the driver: a peer's memory may have gone with its process
            until = time.monotonic() + LOSS_S
            while not self._backend.lost_ranks() and time.monotonic() < until:
                time.sleep(POLL_S)
            if not self._backend.lost_ranks():
                raise
            return Abort.RANK_LOST

    def trace(self) -> list[RunnerRecords]:
        for memory, tensor in zip((self.block.trace, self.block.trace_counts), self._trace, strict=False):
            _bytes_of(memory)[...] = tensor.cpu().numpy()
        return self.block.traced()

    @property
    def iterations_done(self) -> int:
        return int(self._filled.iterations_done)


def _bytes_of(memory: Any) -> npt.NDArray[np.uint8]:
    if isinstance(memory, np.ndarray):
        return memory.view(np.uint8)
    return np.frombuffer(bytes(memory), np.uint8)


def _pin(memory: Any) -> Any:
    import torch

    return torch.from_numpy(_bytes_of(memory).copy()).pin_memory()


def _upload(memory: Any) -> Any:
    import torch

    return torch.from_numpy(_bytes_of(memory).copy()).cuda()
