"""Messages between hosts in an iteration of a program. A message is data followed by its signals, or signals alone."""

from __future__ import annotations

import numpy as np

from distmk.program.program import Program, decode_args
from distmk.program.reader import Ints, ProgramTables, read_tables
from distmk.tasks import TASK_TYPES


def messages_between_hosts(tables: ProgramTables) -> Ints:
    """int64 [num_tasks]: the number of ranks of other hosts that a task writes to or signals, each time it runs.

    The scheduler step may need two puts for such a message: the batch metadata, and the page tables if they have
    changed.
    """
    hosts = np.array([part.header.host for part in tables.ranks])
    if not hosts.any():
        return np.zeros(tables.num_tasks, np.int64)
    reached = np.zeros((tables.num_tasks, tables.num_ranks), np.bool_)
    known = tables.triggers.event >= 0
    reached[tables.triggers.task[known], tables.event_rank[tables.triggers.event[known]]] = True
    for rank, part in enumerate(tables.ranks):
        for task, index in enumerate(tables.descriptor_of[rank].tolist(), int(tables.first_task[rank])):
            kind = TASK_TYPES[part.tasks[index].type]
            for access in kind.accesses(decode_args(part.tasks[index]), rank, tables.num_ranks):
                reached[task, access.rank] |= access.write
    elsewhere = hosts[tables.tasks.rank][:, None] != hosts
    counts: Ints = np.count_nonzero(reached & elsewhere, axis=1).astype(np.int64)
    return counts


def messages_by_op(program: Program) -> dict[str, int]:
    """Messages between hosts in an iteration, by operator; operators without messages are left out."""
    tables = read_tables(program)
    counts: dict[str, int] = {}
    for name, count in zip(tables.task_names(), messages_between_hosts(tables).tolist(), strict=True):
        if count:
            counts[name] = counts.get(name, 0) + count
    return counts
