"""A wait's threshold is the amount by which its event grows in an iteration; the scheduler step signals the iteration
barriers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distmk.abi import NO_EVENT, LaunchKind
from distmk.check.findings import Findings
from distmk.program.reader import Ints, ProgramTables

MAX_NAMED = 6  # tasks named in a fault


@dataclass(frozen=True)
class Signals:
    """Producers and waiters of every event."""

    totals: list[int]  # by event: how much it counts in an iteration
    producers: dict[int, tuple[int, ...]]  # by event: the tasks that signal it
    waits: list[list[tuple[int, int]]]  # by task: events that it waits for, with lags
    waiters: dict[int, list[tuple[int, int]]]  # by event: tasks that wait for it, with lags
    scheduler_step: int | None  # the task that signals the iteration barriers, if there is one
    barriers: tuple[int, ...]  # by rank: the event of its iteration barrier; empty without a scheduler step


def firings(tables: ProgramTables) -> Ints:
    """How often each task signals each of its triggers in an iteration: int64 [tasks].

    For a spread task every worker signals once. For a massive launch every scheduler signals once for each instance.
    """
    tasks = tables.tasks
    massive = np.where(tasks.launch == LaunchKind.MASSIVE, tasks.max_instances * tables.num_schedulers, 1)
    return np.where(tasks.spread, tables.num_workers, massive)


def check_thresholds(tables: ProgramTables, findings: Findings) -> Signals:
    """Check thresholds, lags and iteration barriers. Returns the producers and waiters of all events."""
    totals = [0] * tables.num_events
    producers: dict[int, dict[int, None]] = defaultdict(dict)
    triggers = tables.triggers
    times = firings(tables)[triggers.task]
    for task, event, amount, num_firings in _rows(triggers.task, triggers.event, triggers.amount, times):
        if amount:
            totals[event] += amount * num_firings
            producers[event][task] = None
    waits: list[list[tuple[int, int]]] = [[] for _ in range(tables.num_tasks)]
    waiters: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for task, event, lag in _rows(tables.waits.task, tables.waits.event, tables.waits.lag):
        waits[task].append((event, lag))
        waiters[event].append((task, lag))
    step = next((int(t) for t in np.flatnonzero(tables.tasks.launch == LaunchKind.SCHEDULER)), None)
    signals = Signals(
        totals=totals,
        producers={event: tuple(sorted(tasks)) for event, tasks in producers.items()},
        waits=waits,
        waiters=waiters,
        scheduler_step=step,
        barriers=_barriers(tables, step),
    )
    _check_counts(tables, signals, findings)
    _check_barriers(tables, signals, findings)
    return signals


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _check_counts(tables: ProgramTables, signals: Signals, findings: Findings) -> None:
    waits = tables.waits
    totals = np.array([min(total, 2**62) for total in signals.totals] or [0], np.int64)
    wrong = (waits.count != totals[waits.event]) if tables.num_events else np.zeros(0, np.bool_)
    for index in np.flatnonzero(wrong | (waits.count < 1)):
        task, event, count = int(waits.task[index]), int(waits.event[index]), waits.count[index]
        total = signals.totals[event]
        which = f"is triggered {total} times an iteration" if total else "no task triggers"
        text = f"waits for {count} of {tables.describe_event(event)}, which {which}"
        findings.add("threshold", f"{tables.describe_task(task)} {text}")
    for index in np.flatnonzero(waits.lag > 1):
        task, event = int(waits.task[index]), int(waits.event[index])
        text = f"waits with lag {waits.lag[index]} for {tables.describe_event(event)}, expected 0 or 1"
        findings.add("lag", f"{tables.describe_task(task)} {text}")


def _barriers(tables: ProgramTables, step: int | None) -> tuple[int, ...]:
    if step is None:
        return ()
    headers = [part.header for part in tables.ranks]
    return tuple(
        int(first) + header.iteration_event
        for header, first in zip(headers, tables.first_event[:-1], strict=True)
        if header.iteration_event < header.num_events
    )


def _check_barriers(tables: ProgramTables, signals: Signals, findings: Findings) -> None:
    """With a scheduler step, every rank has an iteration barrier that the step signals once; without, no rank has one."""
    step = signals.scheduler_step
    for rank, part in enumerate(tables.ranks):
        index = part.header.iteration_event
        if (index == NO_EVENT) != (step is None):
            barrier = "no iteration barrier" if index == NO_EVENT else "an iteration barrier"
            runs = "no task" if step is None else tables.describe_task(step)
            findings.add(
                "iteration barrier", f"rank {rank} has {barrier}, but {runs} is run by a scheduler to signal it"
            )
        elif step is not None and index >= part.header.num_events:
            findings.add("iteration barrier", f"rank {rank}: event {index} is not there")
    if step is None:
        return
    for event in signals.barriers:
        if signals.totals[event] != 1 or signals.producers.get(event) != (step,):
            producers = signals.producers.get(event, ())[:MAX_NAMED]
            by = ", ".join(tables.describe_task(task) for task in producers) or "no task"
            text = f"{tables.describe_event(event)} counts {signals.totals[event]} by {by}"
            findings.add("iteration barrier", f"{text}; expected 1 by {tables.describe_task(step)}")
