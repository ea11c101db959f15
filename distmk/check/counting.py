"""An event's count stands for all its producers: none signals for the next iteration before all have signaled for this one."""

from __future__ import annotations

import numpy as np

from distmk.check.findings import Findings
from distmk.check.happens_before import HappensBefore


def check_counting(before: HappensBefore, findings: Findings) -> None:
    """Check every event that some task waits for."""
    tables, signals = before.tables, before.signals
    for event in sorted({*signals.waiters, *signals.barriers}):
        producers = signals.producers.get(event, ())
        if len(producers) < 2 and all(tables.tasks.worker[task] >= 0 for task in producers):
            continue  # a worker runs a task of its queue once an iteration
        requirement = before.requirement_of_event(event)
        next_nodes = np.array(producers, np.int64) + tables.num_tasks
        may_idle = not before.accesses.may_idle.isdisjoint(producers)
        if not requirement.pushes and not may_idle and np.all(before.clocks.table[next_nodes] >= requirement.clock):
            continue
        for task in producers:
            ahead = before.clocks.when_signaled(task + tables.num_tasks)
            if before.after(task + tables.num_tasks, requirement, ahead):
                continue
            slow = next((each for each in producers if not before.clocks.happened(each, ahead)), producers[0])
            text = f"may fire {tables.describe_event(event)} for the next iteration before {tables.describe_task(slow)}"
            findings.add("counting", f"{tables.describe_task(task)} {text} has for this one")
            break
        if findings.full:
            return
