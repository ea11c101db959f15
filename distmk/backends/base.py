"""What every backend offers: a rank's memory, and launches of its program."""

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
    """Have `rank` lose the signal that DISTMK_FAULT_DROP_SIGNAL names, if it names one of this rank."""
    dropped = env.drop_signal()
    if dropped and dropped[0] == rank:
        _, fault.drop_rank, fault.drop_event, fault.drop_nth = dropped


def check_virtual_nodes(backend: str) -> None:
    """UsageError if virtual nodes are asked for by the variable of another backend."""
    if backend != "host" and env.delay_puts():
        raise UsageError("DISTMK_FAULT_DELAY_PUTS is for the host backend; unset it, or use --backend host")


def first_batches(others: Sequence[RankProgram]) -> list[int]:
    """Offsets in the heap of the events that start iterations of programs other than the first. They are 1 when a launch begins:
    the batch of such a program's first iteration comes with the end of another program's turn, and not with this event.
    """
    headers = (program.header for program in others)
    return [header.events_heap_offset + header.iteration_event * EVENT_STRIDE_BYTES for header in headers]


class Launch(Protocol):
    """A launch that is under way on this rank."""

    block: LaunchBlock

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there are tokens to take, time is up, or the launch is over (True)."""
        ...

    def upload_request(self, entry: int) -> None:
        """Bring an entry of the request table to where the batcher reads it."""
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

        On a GPU it is a copy of the present contents, and read-only.
        """
        ...

    def tensor(self, placed: Placed, dtype: str) -> torch.Tensor:
        """An allocation of this rank as a torch tensor [rows, cols] of a buffer's dtype, where the memory is and sharing it.

        Valid until `close`; afterwards it holds its last contents. UsageError: torch is not installed.
        """
        ...

    def write(self, placed: Placed, offset_bytes: int, array: Any) -> None:
        """Write an array, or a tensor on `device`, to an allocation, from byte `offset_bytes` on."""
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
