"""What waits for what, over the tasks of all ranks numbered through: rank 0's first, then rank 1's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distmk import abi
from distmk.abi import LaunchKind, TaskDesc, Trigger, Wait
from distmk.program.program import Program, RankProgram
from distmk.trace.record import Ints


def _array(part: Any, kind: Any) -> Any:
    dtype: np.dtype[Any] = np.dtype(kind)
    return np.frombuffer(part, dtype) if len(part) else np.empty(0, dtype)


class Wiring:
    """Flat arrays of a program that `check` has proved.

    Events are numbered through likewise. Wait w is of task `wait_task[w]`; an iteration's gate is a wait of every task but
    the one that opens it. Trigger t is of task `trigger_task[t]`; triggers are sorted by event, then task.
    """

    def __init__(self, program: Program) -> None:
        parts = program.ranks
        tasks = [_array(part.tasks, TaskDesc) for part in parts]
        self.first_task = np.cumsum([0, *map(len, tasks)])
        self.first_event = np.cumsum([0, *(int(part.header.num_events) for part in parts)])
        self.task_rank: Ints = np.repeat(np.arange(len(parts)), [len(each) for each in tasks])
        self.event_rank: Ints = np.repeat(np.arange(len(parts)), np.diff(self.first_event))
        every = np.concatenate(tasks)
        self.type, self.launch = every["type"].astype(np.int64), every["launch"].astype(np.int64)
        self.order = every["order"].astype(np.int64)
        self.num_tasks, self.num_events = len(every), int(self.first_event[-1])
        self._read_waits(parts, tasks)
        self._read_triggers(parts, tasks)

    def _held(self, tasks: list[Any], what: str, sizes: list[int]) -> tuple[Ints, Ints]:
        """Of each wait (or trigger) that a task holds: the task, and its index among those of all ranks."""
        every = np.concatenate(tasks)
        count, begin = every[f"num_{what}s"].astype(np.int64), every[f"{what}_begin"].astype(np.int64)
        begin += np.cumsum([0, *sizes])[self.task_rank]
        ends = np.cumsum(count)
        index = np.arange(count.sum()) - np.repeat(ends - count, count) + np.repeat(begin, count)
        return np.repeat(np.arange(len(every)), count), index

    def _read_waits(self, parts: Sequence[RankProgram], tasks: list[Any]) -> None:
        held, index = self._held(tasks, "wait", [len(part.waits) for part in parts])
        waits = np.concatenate([_array(part.waits, Wait) for part in parts])[index]
        event = waits["event"].astype(np.int64) + self.first_event[self.task_rank[held]]
        gates: Ints = np.array([part.header.iteration_event for part in parts], np.int64)
        gated = np.flatnonzero((gates[self.task_rank] != abi.NO_EVENT) & (self.launch != LaunchKind.SCHEDULER))
        rank = self.task_rank[gated]
        task = np.concatenate([held, gated])
        by_task = np.argsort(task, kind="stable")
        self.wait_task = task[by_task]
        self.wait_event = np.concatenate([event, gates[rank] + self.first_event[rank]])[by_task]
        self.wait_lag = np.concatenate([waits["lag"].astype(np.int64), np.zeros_like(gated)])[by_task]

    def _read_triggers(self, parts: Sequence[RankProgram], tasks: list[Any]) -> None:
        held, index = self._held(tasks, "trigger", [len(part.triggers) for part in parts])
        triggers = np.concatenate([_array(part.triggers, Trigger) for part in parts])[index]
        event = triggers["event"].astype(np.int64) + self.first_event[triggers["rank"].astype(np.int64)]
        by_event = np.lexsort((held, event))
        self.trigger_task, self.trigger_event = held[by_event], event[by_event]
