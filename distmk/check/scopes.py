"""Signals that cross ranks have system scope, and so do the waits for them.

A signal at GPU scope may stay invisible to other GPUs.
"""

from __future__ import annotations

import numpy as np

from distmk.abi import Trigger, Wait
from distmk.check.findings import Findings
from distmk.program.reader import ProgramTables, as_array


def check_scopes(tables: ProgramTables, findings: Findings) -> None:
    """Check every wait and trigger of an event that tasks of other ranks trigger."""
    waits, triggers = tables.waits, tables.triggers
    spans_ranks = np.zeros(tables.num_events, np.bool_)
    remote = tables.event_rank[triggers.event] != tables.tasks.rank[triggers.task]
    spans_ranks[triggers.event[remote]] = True
    for what, struct, each in (("waits for", Wait, waits), ("triggers", Trigger, triggers)):
        section = "waits" if struct is Wait else "triggers"
        records = np.concatenate([as_array(getattr(part, section), struct) for part in tables.ranks])
        for index in np.flatnonzero(spans_ranks[each.event] & (records["system"][each.record] == 0)):
            task, event = int(each.task[index]), int(each.event[index])
            text = f"{what} {tables.describe_event(event)} at the scope of a GPU, and other ranks trigger it"
            findings.add("scope", f"{tables.describe_task(task)} {text}")
