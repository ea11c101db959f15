"""A launch of the kernel on a GPU: one kernel for all iterations, or several in a row if blocks cannot be kept resident."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from distmk.abi import Abort, LaunchParams
from distmk.backends.base import inject_dropped_signal
from distmk.backends.cuda.kernel import Kernel
from distmk.backends.launch_block import BIAS, LOGPROBS, PAGE, TOKEN, LaunchBlock, RunnerRecords

POLL_S = 0.0002
MAX_POLL_S = 0.005  # on ranks that get no tokens
LOSS_S = 2.0  # from the failure of a GPU to the news that its cause is a lost rank
SPIN_POLLS = 1 << 14  # polls before a waiter backs off


@dataclass(frozen=True)
class LaunchContext:
    """The data that all launches of a program on a GPU share. Tensors are in the GPU's memory."""

    rank: int
    kernel: Kernel
    stream: Any  # a stream of cuda.core
    side_stream: Any  # a stream of torch, for copies beside the kernel
    programs: tuple[Any, ...]  # uint8 [program_bytes]; the first one begins
    program_table: Any  # int64 [programs], their addresses
    heap_bases: Any  # int64 [num_ranks]: address of each rank's heap; 0 if no pointer reaches it
    num_remote_ranks: int  # ranks whose heap no pointer reaches
    local: Any  # uint8 [local_bytes]
    faults_seen: Any  # int64 [1]
    worker_owners: Any  # int64 [grid]
    scheduler_threads: bool
    launch_iterations: int  # iterations of one kernel; 0: all
    launch_numbers: Iterator[int]  # a number for each kernel, beginning at 1

    def fill(self, params: LaunchParams) -> None:
        """Make `params` point at the context."""
        params.program, params.heap_bases = self.programs[0].data_ptr(), self.heap_bases.data_ptr()
        params.programs = self.program_table.data_ptr()
        params.local_base, params.faults_seen = self.local.data_ptr(), self.faults_seen.data_ptr()
        params.worker_owners, params.num_remote_ranks = self.worker_owners.data_ptr(), self.num_remote_ranks
        params.scheduler_threads = int(self.scheduler_threads)
        params.max_iterations = self.launch_iterations
        params.spin_polls = SPIN_POLLS
        inject_dropped_signal(params.fault, self.rank)


class JobState(Protocol):
    """The questions that a running launch asks its backend."""

    def abort_reason(self) -> Abort: ...

    def lost_ranks(self) -> list[int]: ...


class CudaLaunch:
    """Implements `base.Launch`.

    If a kernel runs only some iterations, `wait` and `join` start the kernel for the next ones. Until they are called
    this rank makes no progress, and after the deadline the other ranks give up.
    """

    def __init__(self, context: LaunchContext, job: JobState, block: LaunchBlock) -> None:
        self.block, self._context, self._job = block, context, job
        # The kernel reads and writes these in host memory, and the tables below in its own memory.
        self._pinned = [_pin(memory) for memory in (block.commands, block.tokens, block.counts, block.records)]
        self._pages, self._logprobs = _pin(block.pages, has_contents=False), _pin(block.logprobs)
        self._masks = _pin(block.masks.memory, has_contents=False)
        # Tables of a long context are large. In a launch to which requests are added, each request brings its own rows
        # (`upload_request`).
        has_prompts = bool(block.spec.prompts)
        large = [_pin(memory, has_prompts) for memory in (block.prompts, block.prefixes)]
        self._table = [_pin(block.requests), *large, _pin(block.biases)]
        self._uploaded = [
            *(memory.cuda() if has_prompts else _room_for(memory) for memory in self._table),
            _upload(block.eos_ids),
        ]
        self._trace = [_upload(memory) for memory in (block.trace, block.trace_counts) if block.trace.size]
        self._pinned_params = _pin(LaunchParams())
        self._params = LaunchParams.from_address(self._pinned_params.data_ptr())
        self._fill_params()
        # From here on host and kernel exchange data through the pinned memory.
        block.commands, block.counts, block.records = (
            type(memory).from_address(address)
            for memory, address in (
                (block.commands, self._params.commands),
                (block.counts, self._params.host_counts),
                (block.records, self._params.records),
            )
        )
        block.tokens = self._pinned[1].numpy().view(TOKEN)
        block.requests = type(block.requests).from_address(self._table[0].data_ptr())
        block.prompts = self._table[1].numpy().view(np.int32).reshape(block.prompts.shape)
        block.prefixes = self._table[2].numpy().view(PAGE).reshape(block.prefixes.shape)
        block.biases = self._table[3].numpy().view(BIAS).reshape(block.biases.shape)
        block.pages = self._pages.numpy().view(PAGE).reshape(block.pages.shape)
        block.logprobs = self._logprobs.numpy().view(LOGPROBS)
        block.masks.memory = self._masks.numpy().view(np.uint32).reshape(block.masks.memory.shape)

    def start(self) -> None:
        """Start the first kernel."""
        self._began_s = time.monotonic()
        self._start()

    def _fill_params(self) -> None:
        params = self._params
        self.block.fill(params)
        params.commands, params.tokens, params.host_counts, params.records = (
            tensor.data_ptr() for tensor in self._pinned
        )
        block = self.block
        params.requests, params.prompts, block.prefixes_address, block.biases_address, params.eos_ids = (
            tensor.data_ptr() for tensor in self._uploaded
        )
        if params.logprobs:
            params.logprobs = self._logprobs.data_ptr()
        if self.block.pages_address:
            self.block.pages_address = self._pages.data_ptr()
        self.block.masks.address = self._masks.data_ptr()
        if self._trace:
            params.trace, params.trace_counts = (tensor.data_ptr() for tensor in self._trace)
        params.self = self._pinned_params.data_ptr()
        self._context.fill(params)

    def _start(self) -> None:
        from cuda.core import LaunchConfig, launch

        context, kernel = self._context, self._context.kernel
        config = LaunchConfig(
            grid=kernel.grid,
            block=kernel.block,
            shmem_size=kernel.shared_bytes,
            is_cooperative=not context.launch_iterations,
        )
        self._params.launch_number = next(context.launch_numbers)
        launch(context.stream, config, kernel.kernel, self._pinned_params.data_ptr())
        self._event = context.stream.record()

    def _continue(self) -> bool:
        """After a kernel has ended: start the next one, unless the launch is over. Returns whether it has started one."""
        params = self._params
        if not params.max_iterations or params.iterations_done < params.first_iteration + params.max_iterations:
            return False  # it ran all iterations or gave up
        if self._job.abort_reason():
            return False
        params.first_iteration = params.iterations_done
        self._start()
        return True

    def upload_request(self, entry: int) -> None:
        """Copy an entry and its prompt from pinned memory to the GPU while the kernel runs."""
        import torch

        request = self.block.requests[entry]
        used = (None, request.prompt_len * self.block.prompts.itemsize, request.num_prefix_pages * PAGE.itemsize, None)
        with torch.cuda.stream(self._context.side_stream):
            for pinned, uploaded, num_used in zip(self._table, self._uploaded[:-1], used, strict=True):
                num_bytes = len(pinned) // len(self.block.requests)
                begin = entry * num_bytes
                part = slice(begin, begin + (num_bytes if num_used is None else num_used))
                uploaded[part].copy_(pinned[part], non_blocking=True)
            self._context.side_stream.synchronize()

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        counts = self.block.counts
        while True:
            if self._is_over():
                return True
            if counts.tokens > counts.tokens_read or time.monotonic() >= until:
                return False
            time.sleep(self._nap_s())

    def _nap_s(self) -> float:
        """The time between two looks at the kernel.

        Only rank 0 gets tokens. Other ranks wait for the end of the launch, and look less often the longer it lasts.
        """
        if self._context.rank == 0 or self._params.max_iterations:
            return POLL_S
        return min(MAX_POLL_S, max(POLL_S, 1e-3 * (time.monotonic() - self._began_s)))

    def _is_over(self) -> bool:
        try:
            return bool(self._event.is_done) and not self._continue()
        except Exception:  # the GPU has failed: join() says why
            return True

    def join(self) -> Abort:
        try:
            while True:
                self._context.stream.sync()
                if not self._continue():
                    return self._job.abort_reason()
        except Exception:  # raised by the driver: a peer's memory may have gone with its process
            until = time.monotonic() + LOSS_S
            while not self._job.lost_ranks() and time.monotonic() < until:
                time.sleep(POLL_S)
            if not self._job.lost_ranks():
                raise
            return Abort.RANK_LOST

    def trace(self) -> list[RunnerRecords]:
        for memory, tensor in zip((self.block.trace, self.block.trace_counts), self._trace, strict=False):
            _bytes_of(memory)[...] = tensor.cpu().numpy()
        return self.block.traced()

    @property
    def iterations_done(self) -> int:
        return int(self._params.iterations_done)


def _bytes_of(memory: Any) -> npt.NDArray[np.uint8]:
    """A uint8 view of an array, or a uint8 copy of a ctypes object."""
    if isinstance(memory, np.ndarray):
        return memory.view(np.uint8)
    return np.frombuffer(bytes(memory), np.uint8)


def _pin(memory: Any, has_contents: bool = True) -> Any:
    """A copy in page-locked host memory, as a uint8 tensor. Without `has_contents`, uninitialized memory of the same size."""
    import torch

    if has_contents:
        return torch.from_numpy(_bytes_of(memory).reshape(-1).copy()).pin_memory()
    return torch.empty(memory.nbytes, dtype=torch.uint8, pin_memory=True)


def _room_for(pinned: Any) -> Any:
    """A uint8 tensor on the GPU with as many bytes, uninitialized."""
    import torch

    return torch.empty(len(pinned), dtype=torch.uint8, device="cuda")


def _upload(memory: Any) -> Any:
    """A copy in the GPU's memory, as a uint8 tensor."""
    import torch

    return torch.from_numpy(_bytes_of(memory).copy()).cuda()
