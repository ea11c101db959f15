"""When the last of the tasks that a task waited for had ended: what its start is to be measured from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmk.abi import LaunchKind
from distmk.trace.record import NEVER, UNKNOWN, Ints, Rows
from distmk.trace.wiring import Wiring


def grouped(keys: Ints) -> tuple[Ints, Ints]:
    """Of sorted `keys`: where each group begins, and each group's key."""
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return begins, keys[begins]


@dataclass(frozen=True)
class Times:
    """[num_tasks, num_iterations] of the tasks of all ranks, from iteration `first` on; UNKNOWN without a record.

    `last_end`: the last end of a task's instances, and of the schedulers' share in a massive launch, which its events
    wait for as well. `last_start`, `first_start` likewise.
    """

    first: int
    last_end: Ints
    last_start: Ints
    first_start: Ints

    @staticmethod
    def of(wiring: Wiring, rows: Rows, task: Ints, num_workers: int) -> Times:
        """`task`: of each row, numbered through."""
        first = int(rows["iteration"].min(initial=0)) if not len(rows) else int(rows["iteration"].min())
        shape = (wiring.num_tasks, int(rows["iteration"].max(initial=first)) - first + 1)
        last_end, last_start = np.full(shape, NEVER), np.full(shape, NEVER)
        first_start = np.full(shape, UNKNOWN)
        single = wiring.launch[task] == LaunchKind.SINGLE
        counts = (rows["runner"] < num_workers) | ~single  # who hands out a single task has no part in its events
        at = (task[counts], rows["iteration"][counts] - first)
        np.maximum.at(last_end, at, rows["end_ns"][counts])
        np.maximum.at(last_start, at, rows["start_ns"][counts])
        np.minimum.at(first_start, at, rows["start_ns"][counts])
        for times in (last_end, last_start):
            times[times == NEVER] = UNKNOWN
        return Times(first, last_end, last_start, first_start)

    def shifted(self, table: Ints, index: Ints, lag: Ints) -> Ints:
        """[len(index), num_iterations]: row index[i] of `table` (by iteration), `lag[i]` iterations before.

        What lies before the launch is NEVER; what is before the first iteration on record, UNKNOWN.
        """
        num_iterations = table.shape[1]
        column = np.arange(num_iterations)[None, :] - lag[:, None]
        found = np.take_along_axis(table[index], np.maximum(column, 0), axis=1)
        return np.where(column >= 0, found, np.where(column + self.first < 0, NEVER, UNKNOWN))


@dataclass(frozen=True)
class Ready:
    """[num_tasks, num_iterations]: when the last producer ended, which task that was, and by which event; -1: none."""

    ready_ns: Ints
    producer: Ints
    event: Ints


def _latest(times: Ints, begins: Ints) -> tuple[Ints, Ints]:
    """Of each group of rows, by column: the latest time, and the first row that has it."""
    sizes = np.diff(begins, append=len(times))
    latest = np.maximum.reduceat(times, begins, axis=0)
    row = np.where(times == np.repeat(latest, sizes, axis=0), np.arange(len(times))[:, None], len(times))
    return latest, np.minimum.reduceat(row, begins, axis=0)


def last_ready(wiring: Wiring, times: Times) -> Ready:
    """What every task waited for last."""
    num_iterations = times.last_end.shape[1]
    event_end = np.full((wiring.num_events, num_iterations), UNKNOWN)
    event_task = np.full((wiring.num_events, num_iterations), -1)
    if len(wiring.trigger_event):
        begins, events = grouped(wiring.trigger_event)
        event_end[events], row = _latest(times.last_end[wiring.trigger_task], begins)
        event_task[events] = wiring.trigger_task[row]
    shape = (wiring.num_tasks, num_iterations)
    ready = Ready(np.full(shape, NEVER), np.full(shape, -1), np.full(shape, -1))
    if len(wiring.wait_task):
        begins, tasks = grouped(wiring.wait_task)
        ended = times.shifted(event_end, wiring.wait_event, wiring.wait_lag)
        ready.ready_ns[tasks], row = _latest(ended, begins)
        producers = times.shifted(event_task, wiring.wait_event, wiring.wait_lag)
        known = (ready.ready_ns[tasks] != NEVER) & (ready.ready_ns[tasks] != UNKNOWN)
        column: npt.NDArray[np.int64] = np.arange(num_iterations)[None, :]
        ready.producer[tasks] = np.where(known, producers[row, column], -1)
        ready.event[tasks] = np.where(known, wiring.wait_event[row], -1)
    return ready
