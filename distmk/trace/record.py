"""A trace: one row for every task that a worker or scheduler ran, and the names of operators and events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import LISTED

Rows = npt.NDArray[Any]  # elements are ROW

UNKNOWN = np.iinfo(np.int64).max  # a time without a record
NEVER = np.iinfo(np.int64).min  # a time: the task waited for no other task

ROW: np.dtype[Any] = np.dtype(
    [
        ("rank", np.int64),
        ("runner", np.int64),  # a worker, or num_workers + scheduler
        ("op", np.int64),  # index into `ops`
        ("type", np.int64),  # key of tasks.TASK_TYPES
        ("launch", np.int64),  # abi.LaunchKind
        ("order", np.int64),  # position in the program's sequential order
        ("iteration", np.int64),
        ("instance", np.int64),  # spread task: first instance of its worker, even if there are fewer
        ("start_ns", np.int64),
        ("end_ns", np.int64),  # when its events are signaled
        ("finish_ns", np.int64),  # duration from the end of its body to end_ns
        ("ready_ns", np.int64),  # end of the last task it waited for, or NEVER, or UNKNOWN
        ("source", np.int64),  # rank of that task; -1: none
        ("event", np.int64),  # event by which that task signaled, as index into `events`; -1: none
        ("idle_ns", np.int64),  # time since its runner ended the previous task
        ("messages", np.int64),  # number of messages that it sent to other hosts
    ]
)


@dataclass(frozen=True)
class Trace:
    """Rows (of ROW) sorted by rank, runner and start. Times are nanoseconds since the first start, on rank 0's clock.

    A task has a row on its worker, and a spread task on every worker. A scheduler has a row for every task that it
    dispatched or ran itself. `offsets_ns`: subtracted from each rank's clock, correct to within `uncertainty_ns` (-1:
    unknown). `num_dropped`: records that are not in the trace.
    """

    rows: Rows
    ops: list[str]
    events: list[str]
    num_workers: int
    offsets_ns: list[int]
    uncertainty_ns: list[int]
    num_dropped: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.offsets_ns)

    def on_workers(self) -> Rows:
        """The rows whose runner is a worker."""
        return self.rows[self.rows["runner"] < self.num_workers]

    def waited(self) -> npt.NDArray[np.bool_]:
        """bool [rows]: a worker ran the task and was idle when the last task that the task waited for ended.

        If the same worker ran that last task, it has not waited for the next task of its queue, but it has waited for a
        dispatched task.
        """
        rows = self.rows
        known = (rows["ready_ns"] != UNKNOWN) & (rows["ready_ns"] != NEVER) & (rows["runner"] < self.num_workers)
        idle = rows["ready_ns"] + ~np.isin(rows["launch"], LISTED) > rows["start_ns"] - rows["idle_ns"]
        waited: npt.NDArray[np.bool_] = known & idle & (rows["idle_ns"] > 0)
        return waited


_LAYER = re.compile(r"(?:^|(?<=\.))layers?[._]?(\d+)\.")


def layer_of(op: str) -> int:
    """The layer number in an operator's name (3 in `layer3.qkv` and `model.layers.3.qkv`), or -1."""
    match = _LAYER.search(op)
    return int(match[1]) if match else -1


def family_of(op: str) -> str:
    """The name of an operator or event without its layer numbers."""
    return re.sub(r"(?:(?<=^)|(?<=[.+]))layers?[._]?\d+\.", "", op)
