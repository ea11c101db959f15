"""Event counters of a rank: the counts that its program asks for, and the counts in memory."""

from __future__ import annotations

import numpy as np

from distmk.abi import EVENT_STRIDE_BYTES, LaunchKind, Space
from distmk.engine.session import Session
from distmk.program.layout import Placed
from distmk.program.program import Program


def expected_counts(program: Program, rank: int, num_iterations: int) -> list[int]:
    """For each event of the rank: the sum of all triggers, of all ranks, that name it."""
    counts = [0] * program.ranks[rank].header.num_events
    for part in program.ranks:
        for desc in part.tasks:
            times = desc.max_instances * part.header.num_schedulers if desc.launch == LaunchKind.MASSIVE else 1
            for trigger in part.triggers[desc.trigger_begin : desc.trigger_begin + desc.num_triggers]:
                if trigger.rank == rank:
                    counts[trigger.event] += trigger.amount * times * num_iterations
    return counts


def read_counts(session: Session) -> list[int]:
    """The counters of this rank after its last launch."""
    header = session.rank_program.header
    if not header.num_events:
        return []
    events = Placed("events", Space.HEAP, -1, header.events_heap_offset, header.num_events, EVENT_STRIDE_BYTES)
    counts: list[int] = session.backend.view(events, np.uint64)[:, 0].tolist()
    return counts
