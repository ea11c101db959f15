"""The oracle's verdict on polled operands: byte for byte, between any two tasks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from support.simulation import ITERATIONS, Task

from distmk.abi import LISTED, NO_EVENT
from distmk.program.program import decode_args
from distmk.tasks import TASK_TYPES

if TYPE_CHECKING:
    from support.oracle import Oracle


Trace = tuple["Task", int, bool]  # a task that a worker has gone through, its iteration, whether it is spread


class Run(NamedTuple):
    """Bytes that a task touches. `use`: look (poll, before its waits are met), read, fill or clear."""

    write: bool
    rank: int
    space: int
    begin: int
    end: int
    use: str
    piece: str
    content: object = None  # what the task takes the bytes for
    row: int = 0  # of the access that they belong to


def arrival_faults(oracle: Oracle) -> bool:
    """Whether a task may poll bytes that are neither zero nor final by then."""
    return _Arrivals(oracle).wrong()


def known_when_looking(oracle: Oracle, task: Task, i: int, acts: bool = False) -> int:
    """The nodes, as bits, that have happened when a task may begin: its iteration has begun, and its worker is done with all
    tasks before it. For a spread task, the nodes that all workers know. `acts`: also those before the writes that a task which
    may end without its waits has seen.
    """
    if (task, i, acts) not in oracle.known:
        oracle.known[(task, i, acts)] = _known_when_looking(oracle, task, i, acts)
    return oracle.known[(task, i, acts)]


def _known_when_looking(oracle: Oracle, task: Task, i: int, acts: bool) -> int:
    gate = (task[0], oracle.ranks[task[0]].header.iteration_event)
    nodes = [oracle.told(producer, i, gate) for producer in oracle.producers[gate]] if gate[1] != NO_EVENT else []
    if acts and TASK_TYPES[oracle.tasks[task].type].skips_waits(decode_args(oracle.tasks[task])):
        for event in {(task[0], wait.event) for wait in oracle.waits(task) if not wait.lag}:
            if not any(looks_early(oracle, producer) for producer in oracle.producers[event]):
                nodes += [oracle.told(producer, i, event) for producer in oracle.producers[event]]
    known = ~0
    for trail in oracle.trails[(task, i)]:
        known &= _behind(oracle, trail, i, 2 if oracle.tasks[task].deep_lookahead else 1)
    for node in nodes:
        known |= oracle.past[node] | oracle.bit[node]
    return known


def looks_early(oracle: Oracle, task: Task) -> bool:
    return any(run.use == "look" for run in oracle.runs[task])


def is_done_early(oracle: Oracle, task: Task) -> bool:
    desc = oracle.tasks[task]
    return looks_early(oracle, task) or TASK_TYPES[desc.type].may_skip(decode_args(desc))


def _behind(oracle: Oracle, trail: list[Trace], i: int, num_unmet: int) -> int:
    """The nodes that a worker knows after a trail; the last `num_unmet` tasks of this iteration may have been done before their
    waits were met.
    """
    known = 0
    for place, (task, j, spread) in enumerate(reversed(trail)):
        if place < num_unmet and j == i and (spread or is_done_early(oracle, task)):
            for fact in () if spread else ("R", *oracle.targets[task], "D"):
                known |= oracle.bit[(task, j, fact)]
            continue
        for node in [(task, j, "S")] if spread else [(task, j, "S"), (task, j, "D")]:
            known |= oracle.past[node] | oracle.bit[node]
        if not spread:
            break
    return known


def touches_early(oracle: Oracle, task: Task, run: Run, other: Run) -> bool:
    """Whether a polling task may make this write before its waits are met. It clears only bytes that it has seen written."""
    looks = [look[:5] for look in oracle.runs[task] if look.use == "look"]
    if not run.write or not looks:
        return False
    return not (run.use == "clear" and other.write and (False, *run[1:5]) in looks)


class _Arrivals:
    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.looked_at = {(run.piece, run.rank) for runs in oracle.runs.values() for run in runs if run.use == "look"}
        cleared_bytes = oracle.ranks[0].header.zeroed_heap_bytes
        self.zeroed = {
            piece.name
            for piece in oracle.program.placement.pieces
            if piece.space == 1 and piece.offset + piece.num_bytes <= cleared_bytes
        }

    def wrong(self) -> bool:
        for task, desc in self.oracle.tasks.items():
            if desc.launch not in LISTED and any(run.use == "look" for run in self.oracle.runs[task]):
                return True
            if TASK_TYPES[desc.type].may_idle and any(
                (run.piece, run.rank) in self.looked_at for run in self.oracle.runs[task]
            ):
                return True
            if TASK_TYPES[desc.type].skips_waits(decode_args(desc)) and self._waits_for_more_than_it_sees(task):
                return True
        touched: dict[tuple[str, int], list[tuple[Task, Run]]] = defaultdict(list)
        for task, runs in self.oracle.runs.items():
            for run in runs:
                if (run.piece, run.rank) in self.looked_at:
                    touched[(run.piece, run.rank)].append((task, run))
        return any(self._wrong_there(piece, rank, uses) for (piece, rank), uses in touched.items())

    def _waits_for_more_than_it_sees(self, task: Task) -> bool:
        runs, rank = self.oracle.runs, task[0]
        looks = [run for run in runs[task] if run.use == "look" and run.piece in self.zeroed]
        seen = {(run.piece, byte) for run in looks for byte in range(run.begin, run.end)}
        for wait in self.oracle.waits(task):
            for producer in self.oracle.producers[(rank, wait.event)]:
                writes = [run for run in runs[producer] if run.write]
                if wait.lag or (producer[0] == rank and any(run.rank != rank for run in writes)):
                    return True
                here = [run for run in writes if run.rank == rank]
                if not here or any(run.use != "fill" for run in here):
                    return True
                if any((run.piece, byte) not in seen for run in here for byte in range(run.begin, run.end)):
                    return True
        return False

    def _wrong_there(self, piece: str, rank: int, uses: list[tuple[Task, Run]]) -> bool:
        bounds = sorted({end for _, run in uses for end in (run.begin, run.end)})
        for begin in bounds[:-1]:
            at = [(task, i, run.use) for task, run in uses if run.begin <= begin < run.end for i in range(ITERATIONS)]
            zeroed = piece in self.zeroed
            fills = [(task, i) for task, i, use in at if use == "fill"]
            clears = [(task, i) for task, i, use in at if use == "clear"] + ([] if zeroed else fills)
            looks = [(task, i) for task, i, use in at if use == "look"]
            if self._seen_too_soon(looks, clears, rank) or (zeroed and self._filled_twice(fills, clears, rank)):
                return True
        return False

    def _seen_too_soon(self, looks: list[tuple[Task, int]], clears: list[tuple[Task, int]], rank: int) -> bool:
        """Whether a clear that comes before a task may still be to come when the task polls."""
        for task, i in looks:
            known = known_when_looking(self.oracle, task, i)
            for clearer, j in clears:
                bit = self.oracle.bit[(clearer, j, rank)]
                if bit & self.oracle.past[(task, i, "S")] and not bit & known:
                    return True
        return False

    def _filled_twice(self, fills: list[tuple[Task, int]], clears: list[tuple[Task, int]], rank: int) -> bool:
        before = self.oracle.is_before
        if {*fills} & {*clears}:
            return True
        for a, b in itertools.combinations(fills, 2):
            (first, i), (last, j) = (a, b) if before((a[0], a[1], rank), (b[0], b[1], "S")) else (b, a)
            if not any(
                before((first, i, rank), (task, k, "S")) and before((task, k, rank), (last, j, "S"))
                for task, k in clears
            ):
                return True
        return False
