"""A trace: a row for every task that a worker or scheduler ran, and what is needed to name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import LISTED

Rows = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

UNKNOWN = np.iinfo(np.int64).max  # a time: it left no record
NEVER = np.iinfo(np.int64).min  # a time: there was nothing to wait for

ROW: np.dtype[Any] = np.dtype(
    [
        ("rank", np.int64),
        ("runner", np.int64),  # a worker, or num_workers + a scheduler
        ("op", np.int64),  # index into `ops`
        ("type", np.int64),  # of tasks.TASK_TYPES
        ("launch", np.int64),  # abi.LaunchKind
        ("order", np.int64),  # the task's place in the program
        ("iteration", np.int64),
        ("instance", np.int64),  # of a spread task: the first of its worker's share, whether or not there are so many
        ("start_ns", np.int64),
        ("end_ns", np.int64),  # its triggers are fired
        ("finish_ns", np.int64),  # the last part of it, from the end of its body on
        ("ready_ns", np.int64),  # the end of the last task it waited for; NEVER, UNKNOWN
        ("source", np.int64),  # the rank of that task; -1 without one
        ("event", np.int64),  # the event it triggered, index into `events`; -1 without one
        ("idle_ns", np.int64),  # how long its runner had had nothing to run
    ]
)


@dataclass(frozen=True)
class Trace:
    """Rows (of ROW) sorted by rank, runner and start, in nanoseconds from the first start, on rank 0's clock.

    A task is on its worker, a spread one on every worker; a scheduler has a row for every launch it handed out, and for
    what it ran itself. `offsets_ns`: what was taken off each rank's clock, certain to within `uncertainty_ns`.
    `num_dropped`: records of earlier iterations, which are not here.
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
        """The rows of tasks that ran on workers."""
        return self.rows[self.rows["runner"] < self.num_workers]

    def waited(self) -> npt.NDArray[np.bool_]:
        """Of each row: it ran on a worker that had been idle when the last task it waited for ended.

        A worker that ends that task itself does not wait for what its queue has next, but for what is handed out.
        """
        rows = self.rows
        known = (rows["ready_ns"] != UNKNOWN) & (rows["ready_ns"] != NEVER) & (rows["runner"] < self.num_workers)
        idle = rows["ready_ns"] + ~np.isin(rows["launch"], LISTED) > rows["start_ns"] - rows["idle_ns"]
        found: npt.NDArray[np.bool_] = known & idle & (rows["idle_ns"] > 0)
        return found


_LAYER = re.compile(r"(?:^|(?<=\.))layers?[._]?(\d+)\.")


def layer_of(op: str) -> int:
    """The layer that an operator's name begins with (`layer3.qkv`, `model.layers.3.qkv`), or -1."""
    found = _LAYER.search(op)
    return int(found[1]) if found else -1


def family_of(op: str) -> str:
    """An operator's, or event's, name without numbers of layers."""
    return re.sub(r"(?:(?<=^)|(?<=[.+]))layers?[._]?\d+\.", "", op)
