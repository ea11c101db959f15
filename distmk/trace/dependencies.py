"""Which task waits for which, as flat arrays sorted for grouped reductions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distmk.abi import NO_EVENT, LaunchKind
from distmk.program.program import Program
from distmk.program.reader import Ints, ProgramTables, read_tables


@dataclass(frozen=True)
class Dependencies:
    """Waits and triggers of a program that `check` has proved. Each copy of a spread task is its own task here.

    Wait w belongs to task `wait_task[w]`; waits are sorted by task. The iteration barrier is a wait of every task
    except the one that signals it. Trigger t belongs to task `trigger_task[t]`; triggers are sorted by event, then
    task.
    """

    tables: ProgramTables
    wait_task: Ints
    wait_event: Ints
    wait_lag: Ints
    trigger_task: Ints
    trigger_event: Ints

    @staticmethod
    def of(program: Program) -> Dependencies:
        tables = read_tables(program, merge_copies=False)
        waits, triggers = tables.waits, tables.triggers
        behind, barrier = _iteration_barrier(tables)
        task = np.concatenate([waits.task, behind])
        by_task = np.argsort(task, kind="stable")
        by_event = np.lexsort((triggers.task, triggers.event))
        return Dependencies(
            tables,
            wait_task=task[by_task],
            wait_event=np.concatenate([waits.event, barrier])[by_task],
            wait_lag=np.concatenate([waits.lag, np.zeros_like(behind)])[by_task],
            trigger_task=triggers.task[by_event],
            trigger_event=triggers.event[by_event],
        )


def _iteration_barrier(tables: ProgramTables) -> tuple[Ints, Ints]:
    """The tasks that wait for the iteration barrier of their rank, and the barrier's event for each."""
    events: Ints = np.array([part.header.iteration_event for part in tables.ranks], np.int64)
    rank = tables.tasks.rank
    behind = np.flatnonzero((events[rank] != NO_EVENT) & (tables.tasks.launch != LaunchKind.SCHEDULER))
    return behind, events[rank[behind]] + tables.first_event[rank[behind]]
