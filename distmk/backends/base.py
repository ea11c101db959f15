"""The interface of every backend: a rank's memory, and launches of its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from distmk import abi, env
from distmk.abi import EVENT_STRIDE_BYTES, MAX_OWN_SCHEDULERS, Abort
from distmk.backends.launch_block import LaunchBlock, RunnerRecords
from distmk.backends.launch_spec import LaunchSpec
from distmk.errors import UsageError
from distmk.program.layout import Placed
from distmk.program.program import RankProgram

if TYPE_CHECKING:
    import torch


def require_warps(num_schedulers: int) -> None:
    """UsageError if a GPU's kernel has too few warps for `num_schedulers`, which all run in one block."""
    if num_schedulers > MAX_OWN_SCHEDULERS:
        raise UsageError(
            f"{num_schedulers} schedulers do not fit on an SM, which has warps for {MAX_OWN_SCHEDULERS}; ask for fewer, "
            "or let them ride in the workers"
        )


def inject_dropped_signal(fault: abi.Fault, rank: int) -> None:
    """If DISTMK_FAULT_DROP_SIGNAL names a signal of `rank`, make the rank lose this signal."""
    dropped = env.drop_signal()
    if dropped and dropped[0] == rank:
        _, fault.drop_rank, fault.drop_event, fault.drop_nth = dropped


def check_virtual_nodes(backend: str) -> None:
    """UsageError if a variable of the host backend asks another backend for virtual nodes."""
    if backend != "host" and env.delay_puts():
        raise UsageError("DISTMK_FAULT_DELAY_PUTS is for the host backend; unset it, or use --backend host")


def first_batches(others: Sequence[RankProgram]) -> list[int]:
    """Heap offsets of the events that start iterations, for the programs other than the first.

    These events are 1 when a launch begins. The batch of such a program's first iteration comes at the end of another
    program's turn, and not with this event.
    """
    headers = (program.header for program in others)
    return [header.events_heap_offset + header.iteration_event * EVENT_STRIDE_BYTES for header in headers]


class Launch(Protocol):
    """A launch that is under way on this rank."""

    block: LaunchBlock

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there are tokens to take, time is up, or the launch is over. Returns whether it is over."""
        ...

    def upload_request(self, entry: int) -> None:
        """Copy an entry of the request table to the memory in which the batcher reads it."""
        ...

    def join(self) -> Abort:
        """Wait until this rank has left the launch. Returns the reason if something ended it early."""
        ...

    def trace(self) -> list[RunnerRecords]:
        """After `join`: the trace of every worker, then of every scheduler of this rank."""
        ...

    @property
    def iterations_done(self) -> int: ...


class Backend(Protocol):
    """One rank's memory and launches. Construction is collective over all ranks."""

    name: str
    device: str  # device of the arrays that `write` prefers: "cpu" (numpy), else a torch device

    def view(self, placed: Placed, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An allocation of this rank as an array [rows, row_bytes / itemsize]; valid until `close`.

        On a GPU it is a read-only copy of the present contents.
        """
        ...

    def tensor(self, placed: Placed, dtype: str) -> torch.Tensor:
        """An allocation of this rank as a torch tensor [rows, cols] of a buffer's dtype.

        The tensor shares the allocation's memory.

        Valid until `close`; afterwards it keeps its last contents. UsageError: torch is not installed.
        """
        ...

    def write(self, placed: Placed, offset_bytes: int, array: Any) -> None:
        """Write an array, or a tensor on `device`, to an allocation, beginning at byte `offset_bytes`."""
        ...

    def reset(self) -> None:
        """Zero this rank's abort flag, events, rings and Lamport buffers. No rank may be in a launch."""
        ...

    def start(self, spec: LaunchSpec) -> Launch: ...

    def abort(self, reason: Abort) -> None:
        """Make every rank leave the launch."""
        ...

    def join_all(self) -> None:
        """Wait until this rank has left every launch, even one whose `Launch` object an exception has lost."""
        ...

    def lost_ranks(self) -> list[int]:
        """Ranks whose process is gone."""
        ...

    def close(self) -> None: ...
