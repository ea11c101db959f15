"""What every backend offers: a rank's memory, and launches of its program."""

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
    """The trace of one worker or scheduler in a launch: its last entries, oldest first, and how many earlier ones it dropped."""

    entries: Entries
    num_dropped: int


@dataclass(frozen=True)
class LaunchSpec:
    """What one launch is to do. Requests matter on rank 0 only.

    `num_iterations`: of a program without an iteration barrier; with one, the scheduler step ends the launch.
    `trace_capacity`: entries that every worker and scheduler keeps, those of its last tasks (0: no trace).
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
    """A wait that had not been met when its launch was given up; `iteration` and `order` are its place in program order.

    `expired`: its own deadline passed; else it was told to leave.
    """

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
    """The host memory that a launch's parameters point to."""

    spec: LaunchSpec
    requests: Any  # ctypes arrays of Request, TokenEvent and WaitRecordABI
    prompts: npt.NDArray[np.int32]
    eos_ids: npt.NDArray[np.int32]
    tokens: Any
    records: Any
    trace: Entries  # [num_workers + num_schedulers, trace_capacity]
    trace_counts: npt.NDArray[np.uint64]
    token_count: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)

    @staticmethod
    def of(spec: LaunchSpec, program: RankProgram) -> LaunchBlock:
        """Allocate for a launch of `program`."""
        num_runners = program.header.num_workers + program.header.num_schedulers
        requests = (Request * max(1, len(spec.prompts)))()
        begin = 0
        for request, prompt, max_new in zip(requests, spec.prompts, spec.max_new, strict=False):
            request.prompt_begin, request.prompt_len, request.max_new = begin, len(prompt), max_new
            request.ignore_eos = int(spec.ignore_eos)
            begin += len(prompt)
        num_tokens = sum(spec.max_new)  # room for all: the ring never fills before the host has read it
        return LaunchBlock(
            spec=spec,
            requests=requests,
            prompts=np.array([token for prompt in spec.prompts for token in prompt] or [0], np.int32),
            eos_ids=np.array(spec.eos_ids or [0], np.int32),
            tokens=(TokenEvent * max(1, num_tokens))(),
            records=(WaitRecordABI * num_runners)(),
            trace=np.zeros((num_runners, spec.trace_capacity), ENTRY),
            trace_counts=np.zeros(num_runners, np.uint64),
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
        """The trace of each worker, then of each scheduler, once the launch is over."""
        return [
            RunnerRecords(np.roll(ring, -count), count - len(ring))
            if count > len(ring)
            else RunnerRecords(ring[:count], 0)
            for ring, count in zip(self.trace, self.trace_counts.tolist(), strict=True)
        ]

    def stuck_waits(self, program: RankProgram) -> list[StuckWait]:
        """The waits that had not been met when the launch was given up, in program order."""
        found = []
        for record in self.records:
            if not record.filled or record.event == abi.NO_EVENT or record.got >= record.want:
                continue  # told to leave while nothing was missing
            task, order = "start of an iteration", -1
            if record.order != abi.NO_EVENT:
                task, order = f"{record.task} ({program.task_names[record.task]})", record.order
                if program.tasks[record.task].launch == LaunchKind.SCHEDULER:
                    order = -2  # the scheduler step comes before all others
            event = f"{record.event} ({program.event_names[record.event]})"
            expired, worker = bool(record.expired), record.worker
            found.append(StuckWait(record.iteration, order, expired, worker, task, event, record.want, record.got))
        return sorted(found, key=lambda wait: (wait.iteration, wait.order))


def require_warps(num_schedulers: int) -> None:
    """UsageError if a GPU's kernel has too few warps for `num_schedulers`, which all run in one block."""
    if num_schedulers > MAX_OWN_SCHEDULERS:
        raise UsageError(
            f"{num_schedulers} schedulers do not fit on an SM, which has warps for {MAX_OWN_SCHEDULERS}; ask for fewer, "
            "or let them ride in the workers"
        )


def inject_dropped_signal(fault: abi.Fault, rank: int) -> None:
    """Have `rank` lose the signal that DISTMK_FAULT_DROP_SIGNAL names, if it names one of this rank."""
    dropped = env.drop_signal()
    if dropped and dropped[0] == rank:
        _, fault.drop_rank, fault.drop_event, fault.drop_nth = dropped


def check_virtual_nodes(backend: str) -> None:
    """UsageError if virtual nodes are asked for by the variable of another backend."""
    if backend != "host" and env.delay_puts():
        raise UsageError("DISTMK_FAULT_DELAY_PUTS is for the host backend; unset it, or use --backend host")


class Launch(Protocol):
    """A launch that is under way on this rank."""

    block: LaunchBlock

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until more than `seen` tokens are out, time is up, or the launch is over (True)."""
        ...

    def join(self) -> Abort:
        """Wait until this rank has left the launch; returns what ended it early, if anything."""
        ...

    def trace(self) -> list[RunnerRecords]:
        """After `join`: the trace of every worker, then of every scheduler of this rank."""
        ...

    @property
    def iterations_done(self) -> int: ...


class Backend(Protocol):
    """One rank's memory and launches. Making one is collective over all ranks."""

    name: str
    device: str  # of the arrays that `write` prefers: "cpu" (numpy), else a torch device

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An allocation of this rank as an array [rows, row_bytes / itemsize]; valid until `close`.

        On a GPU it is a copy of the present contents.
        """
        ...

    def write(self, placed: Placed, row: int, array: Any) -> None:
        """Write an array, or a tensor on `device`, to the rows of an allocation from `row` on."""
        ...

    def reset(self) -> None:
        """Zero this rank's abort flag, events, rings and Lamport buffers; no rank may be in a launch."""
        ...

    def start(self, spec: LaunchSpec) -> Launch: ...

    def abort(self, reason: Abort) -> None:
        """Make every rank leave the launch."""
        ...

    def join_all(self) -> None:
        """Wait until this rank has left every launch, also one whose `Launch` was lost by an exception."""
        ...

    def lost_ranks(self) -> list[int]:
        """Ranks whose process is gone."""
        ...

    def close(self) -> None: ...
