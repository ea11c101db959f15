"""When the last task that a task waited for had ended. The delay of the task's start counts from that moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmk.abi import LaunchKind
from distmk.program.reader import Ints, ProgramTables
from distmk.trace.dependencies import Dependencies
from distmk.trace.record import NEVER, UNKNOWN, Rows


def grouped(keys: Ints) -> tuple[Ints, Ints]:
    """For sorted `keys`: the first index of each group, and each group's key."""
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return begins, keys[begins]


@dataclass(frozen=True)
class Times:
    """int64 [num_tasks, num_iterations], in nanoseconds, beginning at iteration `first`; UNKNOWN without a record.

    last_end: the last end among a task's instances and, for a massive launch, among the schedulers that dispatched it,
      because its events count these as well.
    last_start, first_start: among the same instances and schedulers.
    """

    first: int
    last_end: Ints
    last_start: Ints
    first_start: Ints

    @staticmethod
    def of(tables: ProgramTables, rows: Rows, task: Ints) -> Times:
        """`task`: the task of each row."""
        first = int(rows["iteration"].min(initial=0)) if not len(rows) else int(rows["iteration"].min())
        shape = (tables.num_tasks, int(rows["iteration"].max(initial=first)) - first + 1)
        last_end, last_start = np.full(shape, NEVER), np.full(shape, NEVER)
        first_start = np.full(shape, UNKNOWN)
        single = tables.tasks.launch[task] == LaunchKind.SINGLE
        counted = (
            rows["runner"] < tables.num_workers
        ) | ~single  # the scheduler of a single task signals no event for it
        cell = (task[counted], rows["iteration"][counted] - first)
        np.maximum.at(last_end, cell, rows["end_ns"][counted])
        np.maximum.at(last_start, cell, rows["start_ns"][counted])
        np.minimum.at(first_start, cell, rows["start_ns"][counted])
        for times in (last_end, last_start):
            times[times == NEVER] = UNKNOWN
        return Times(first, last_end, last_start, first_start)

    def lagged(self, table: Ints, index: Ints, lag: Ints) -> Ints:
        """int64 [len(index), num_iterations]: row index[i] of `table` (by iteration), `lag[i]` iterations earlier.

        NEVER before the launch; UNKNOWN before the first recorded iteration.
        """
        num_iterations = table.shape[1]
        column = np.arange(num_iterations)[None, :] - lag[:, None]
        values = np.take_along_axis(table[index], np.maximum(column, 0), axis=1)
        return np.where(column >= 0, values, np.where(column + self.first < 0, NEVER, UNKNOWN))


@dataclass(frozen=True)
class Ready:
    """int64 [num_tasks, num_iterations]: the end of the last producer, that producer, and the event it signaled; -1: none."""

    ready_ns: Ints
    producer: Ints
    event: Ints


def _latest(times: Ints, begins: Ints) -> tuple[Ints, Ints]:
    """For each group of rows, by column: the latest time, and the first row that has it."""
    sizes = np.diff(begins, append=len(times))
    latest = np.maximum.reduceat(times, begins, axis=0)
    row = np.where(times == np.repeat(latest, sizes, axis=0), np.arange(len(times))[:, None], len(times))
    return latest, np.minimum.reduceat(row, begins, axis=0)


def last_ready(dependencies: Dependencies, times: Times) -> Ready:
    """For every task, its last producer."""
    num_iterations = times.last_end.shape[1]
    event_shape = (dependencies.tables.num_events, num_iterations)
    event_end, event_task = np.full(event_shape, UNKNOWN), np.full(event_shape, -1)
    if len(dependencies.trigger_event):
        begins, events = grouped(dependencies.trigger_event)
        event_end[events], row = _latest(times.last_end[dependencies.trigger_task], begins)
        event_task[events] = dependencies.trigger_task[row]
    shape = (dependencies.tables.num_tasks, num_iterations)
    ready = Ready(np.full(shape, NEVER), np.full(shape, -1), np.full(shape, -1))
    if len(dependencies.wait_task):
        begins, tasks = grouped(dependencies.wait_task)
        ended = times.lagged(event_end, dependencies.wait_event, dependencies.wait_lag)
        ready.ready_ns[tasks], row = _latest(ended, begins)
        producers = times.lagged(event_task, dependencies.wait_event, dependencies.wait_lag)
        known = (ready.ready_ns[tasks] != NEVER) & (ready.ready_ns[tasks] != UNKNOWN)
        column: npt.NDArray[np.int64] = np.arange(num_iterations)[None, :]
        ready.producer[tasks] = np.where(known, producers[row, column], -1)
        ready.event[tasks] = np.where(known, dependencies.wait_event[row], -1)
    return ready
