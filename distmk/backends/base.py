"""What a backend offers, whichever it is: memory of a rank, and launches of its program."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from distmk import abi, env
from distmk.abi import MAX_OWN_SCHEDULERS, Abort, LaunchKind, Request, TokenEvent, TraceEntry, WaitRecordABI
from distmk.errors import UsageError
from distmk.program.layout import Placed
from distmk.program.program import RankProgram

ENTRY: np.dtype[Any] = np.dtype(TraceEntry)
Entries = npt.NDArray[Any]  # of ENTRY


class RunnerRecords(NamedTuple):
    """What a worker or scheduler kept of a launch, oldest first, and how many records it had no more room for."""

    entries: Entries
    num_dropped: int


@dataclass(frozen=True)
class LaunchSpec:
    """What one launch is to do. Requests matter on rank 0 only; `num_iterations` where the program has no gate.

    `trace_capacity`: of how many tasks every worker and scheduler keeps a record, the last ones (0: none).
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    max_new: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_ids: tuple[int, ...] = ()
    num_iterations: int = 0
    deadline_s: float = 30.0
    trace_capacity: int = 0


@dataclass(frozen=True)
class StuckWait:
    """One waiter's last words, with the iteration and `order` to find the first of them in program order."""

    iteration: int
    order: int
    expired: bool
    worker: int
    task: str
    event: str
    want: int
    got: int


@dataclass
class LaunchBlock:
    """The memory that a launch's parameters point to."""

    spec: LaunchSpec
    requests: Any
    prompts: npt.NDArray[np.int32]
    eos_ids: npt.NDArray[np.int32]
    tokens: Any
    records: Any
    trace: Entries  # [num_workers + num_schedulers, trace_capacity]
    trace_counts: npt.NDArray[np.uint64]
    token_count: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)

    @staticmethod
    def of(spec: LaunchSpec, program: RankProgram) -> LaunchBlock:
        num_runners = program.header.num_workers + program.header.num_schedulers
        requests = (Request * max(1, len(spec.prompts)))()
        begin = 0
        for slot, prompt, max_new in zip(requests, spec.prompts, spec.max_new, strict=False):
            slot.prompt_begin, slot.prompt_len, slot.max_new = begin, len(prompt), max_new
            slot.ignore_eos = int(spec.ignore_eos)
            begin += len(prompt)
        return LaunchBlock(
            spec,
            requests,
            np.array([token for prompt in spec.prompts for token in prompt] or [0], np.int32),
            np.array(spec.eos_ids or [0], np.int32),
            (
                TokenEvent * max(1, sum(spec.max_new))
            )(),  # room for all: the ring never fills before the host has read it
            (WaitRecordABI * num_runners)(),
            np.zeros((num_runners, spec.trace_capacity), ENTRY),
            np.zeros(num_runners, np.uint64),
        )

    def fill(self, params: abi.LaunchParams) -> None:
        """Point `params` at this block."""
        params.requests, params.prompts = ctypes.addressof(self.requests), self.prompts.ctypes.data
        params.tokens, params.token_count = ctypes.addressof(self.tokens), ctypes.addressof(self.token_count)
        params.eos_ids, params.records = self.eos_ids.ctypes.data, ctypes.addressof(self.records)
        params.num_requests, params.num_eos = len(self.spec.prompts), len(self.spec.eos_ids)
        params.token_capacity = len(self.tokens)
        params.num_iterations = self.spec.num_iterations
        params.deadline_ns = int(self.spec.deadline_s * 1e9)
        if self.spec.trace_capacity:
            params.trace, params.trace_counts = self.trace.ctypes.data, self.trace_counts.ctypes.data
            params.trace_capacity = self.spec.trace_capacity

    def traced(self) -> list[RunnerRecords]:
        """What each worker, then each scheduler, kept of a launch that is over."""
        return [
            RunnerRecords(np.roll(ring, -count), count - len(ring))
            if count > len(ring)
            else RunnerRecords(ring[:count], 0)
            for ring, count in zip(self.trace, self.trace_counts.tolist(), strict=True)
        ]

    def stuck_waits(self, program: RankProgram) -> list[StuckWait]:
        """What the waiters were waiting for when the launch was given up, in program order."""
        found = []
        for record in self.records:
            if not record.filled or record.event == abi.NO_EVENT or record.got >= record.want:
                continue  # it was told to leave with nothing missing
            task, order = "start of an iteration", -1
            if record.order != abi.NO_EVENT:
                task, order = f"{record.task} ({program.task_names[record.task]})", record.order
                if program.tasks[record.task].launch == LaunchKind.SCHEDULER:
                    order = -2  # it is what starts the iteration
            event = f"{record.event} ({program.event_names[record.event]})"
            expired, worker = bool(record.expired), record.worker
            found.append(StuckWait(record.iteration, order, expired, worker, task, event, record.want, record.got))
        return sorted(found, key=lambda wait: (wait.iteration, wait.order))


def require_warps(num_schedulers: int) -> None:
    """UsageError unless the GPU's kernel has a warp for each of a rank's schedulers in the one block of their own."""
    if num_schedulers > MAX_OWN_SCHEDULERS:
        raise UsageError(
            f"{num_schedulers} schedulers do not fit on an SM, which has warps for {MAX_OWN_SCHEDULERS}; ask for fewer, "
            "or let them ride in the workers"
        )


def inject_dropped_signal(fault: abi.Fault, rank: int) -> None:
    """Let this rank lose the signal that DISTMK_FAULT_DROP_SIGNAL names, if it is this rank's."""
    dropped = env.drop_signal()
    if dropped and dropped[0] == rank:
        _, fault.drop_rank, fault.drop_event, fault.drop_nth = dropped


def refuse_what_others_have(backend: str) -> None:
    """UsageError where virtual nodes are asked for in the way of another backend."""
    if backend != "host" and env.delay_puts():
        raise UsageError("DISTMK_FAULT_DELAY_PUTS is for the host backend; unset it, or use --backend host")
    if backend == "host" and env.virtual_node_size():
        raise UsageError("DISTMK_VIRTUAL_NODE_SIZE is for GPUs and --backend emulated; unset it, or use one of them")


class Launch(Protocol):
    """A launch that is under way on this rank."""

    block: LaunchBlock

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until more than `seen` tokens are out, time is up, or the launch is over (True)."""
        ...

    def join(self) -> Abort:
        """Wait for this rank to leave the launch; what ended it early, if anything."""
        ...

    def trace(self) -> list[RunnerRecords]:
        """After `join`: what every worker, then every scheduler of this rank kept."""
        ...

    @property
    def iterations_done(self) -> int: ...


class Backend(Protocol):
    """One rank's memory and launches. Making one is collective over all ranks."""

    name: str
    device: str  # where `write` likes its data: "cpu" for numpy arrays, else a torch device

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A piece of this rank's memory as an array [rows, row_bytes / itemsize]; valid until `close`.

        On a GPU it is a copy, of the moment.
        """
        ...

    def write(self, placed: Placed, row: int, array: Any) -> None:
        """Fill rows of a piece from `row` on with an array, or with a tensor on `device`."""
        ...

    def reset(self) -> None:
        """Zero the abort flag, events, rings and buffers of what arrives of this rank; no rank may be in a launch."""
        ...

    def start(self, spec: LaunchSpec) -> Launch: ...

    def abort(self, reason: Abort) -> None:
        """Make every rank leave the launch."""
        ...

    def lost_ranks(self) -> list[int]:
        """Ranks whose process is gone."""
        ...

    def close(self) -> None: ...
