"""The oracle's verdict on what bytes are taken for: byte for byte."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from distmk.abi import LaunchKind
from distmk.program.program import decode_args
from distmk.tasks import TASK_TYPES

if TYPE_CHECKING:
    from support.oracle import Oracle


def meaning_faults(oracle: Oracle) -> set[str]:
    """Kinds of fault: overlap, scope, content, flow, instances."""
    found = {"overlap"} if any(_overlaps_itself(runs) for runs in oracle.runs.values()) else set()
    for task, desc in oracle.tasks.items():
        if TASK_TYPES[desc.type].num_instances(decode_args(desc)) != desc.max_instances:
            found.add(f"instances of {task}")
    steps = [desc for desc in oracle.tasks.values() if desc.launch == LaunchKind.SCHEDULER]
    batch = decode_args(steps[0]).batch if steps else 0
    if any(part.header.iteration_batch != batch for part in oracle.ranks):
        found.add("content")
    for desc in oracle.tasks.values():
        if steps and getattr(decode_args(desc), "batch", 0) not in (0, batch):
            found.add("content")
    return found | _scopes(oracle) | _bytes(oracle, bool(steps))


def _overlaps_itself(runs: list) -> bool:  # type: ignore[type-arg]
    """Whether a task writes bytes that it also accesses otherwise; it may read a row just where it writes that row."""
    for a, b in itertools.combinations(sorted(runs, key=lambda run: (run.write, run[1:5])), 2):
        overlap = b.write and a.begin < b.end and b.begin < a.end and a[1:3] == b[1:3]
        if overlap and (a.write or (a.begin, a.end, a.row) != (b.begin, b.end, b.row)):
            return True
    return False


def _scopes(oracle: Oracle) -> set[str]:
    far = {(t.rank, t.event) for task in oracle.tasks for t in oracle.triggers(task) if t.rank != task[0]}
    for task in oracle.tasks:
        if any(not wait.system and (task[0], wait.event) in far for wait in oracle.waits(task)):
            return {"scope"}
        if any(not t.system and (t.rank, t.event) in far for t in oracle.triggers(task)):
            return {"scope"}
    return set()


def _bytes(oracle: Oracle, is_whole: bool) -> set[str]:
    """Each byte is taken for one thing by all tasks; what is read is written, and what is written is read."""
    sizes = {
        (rank, space): size
        for rank, part in enumerate(oracle.ranks)
        for space, size in ((1, part.header.heap_bytes), (2, part.header.local_bytes))
    }
    contents: dict[object, int] = {}
    taken_for = {
        key: np.zeros(size, np.uint8) for key, size in sizes.items()
    }  # a number for each content, 255: numbers
    used = {(key, write): np.zeros(size, bool) for key, size in sizes.items() for write in (False, True)}
    found = set()
    for run in {*itertools.chain(*oracle.runs.values())}:
        key, part = (run.rank, run.space), slice(run.begin, run.end)
        if run.content or run.write:
            number = contents.setdefault(run.content, 1 + len(contents)) if run.content else 255
            before = taken_for[key][part]
            if ((before != 0) & (before != number)).any():
                found.add("content")
            before[:] = number
        if (is_whole or run.content) and run.use != "clear":
            used[(key, run.write)][part] = True
    for piece in oracle.program.placement.pieces:
        for key in sizes:
            if piece.space == key[1] and piece.rank in (-1, key[0]) and not piece.read_only:
                read, written = (used[(key, w)][piece.offset : piece.offset + piece.num_bytes] for w in (False, True))
                if read.any() and written.any() and (read != written).any():
                    found.add("flow")
    return found
