"""Proof that a compiled program is correct, from its encoded bytes alone, before it may run.

Each module proves something, and may rely on the ones before it:

- `headers`: headers agree with the sections, with the memory layout and between ranks.
- `structure`: every reference points at something; every worker runs the tasks it should, once.
- `allocations`: allocations lie in their memory and apart. `bounds`: every access lies in one of them.
- `contents`: tasks take bytes for the same. `scopes`: signals across ranks have system scope.
- `thresholds`: every wait's threshold is its event's count an iteration. `deadlock`: nothing waits in a circle.
- `happens_before`: vector clocks of two iterations. `counting`: a count stands for its tasks.
- `early_start`: what has happened when a task may start before its waits are met.
- `turns`: programs that take turns find nothing of each other under way.
- `races`: conflicting accesses are ordered. `lamport`: polled elements are zero or right.

Nothing is taken from the graph or from the derivation of the waits.

A waiter comes after all tasks that trigger its event, with one reservation: a push fires its rank's events together with the
data, when the task has read all it reads but may not have written to the other ranks yet. Its writes to a rank are known to
waiters for an event of that rank, and to any task that knows it is done: later tasks of its worker, and waiters for an event
that it fires without a push.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from distmk.check.bounds import check_bounds
from distmk.check.contents import check_contents
from distmk.check.counting import check_counting
from distmk.check.deadlock import StartGraph
from distmk.check.early_start import EarlyStart
from distmk.check.findings import Findings
from distmk.check.happens_before import HappensBefore
from distmk.check.headers import check_headers
from distmk.check.lamport import check_lamport
from distmk.check.races import check_races
from distmk.check.scopes import check_scopes
from distmk.check.structure import check_structure
from distmk.check.thresholds import check_thresholds
from distmk.check.turns import Turn, check_together, check_turn, shared_pieces, summarize
from distmk.errors import CheckError
from distmk.gc_pause import no_collection
from distmk.program.layout import Placed
from distmk.program.program import Program
from distmk.program.reader import ProgramTables, read_tables
from distmk.progress import progress

MAX_CLOCK_BYTES = 2**33  # Llama-3.1-70B on eight GPUs takes 4.8 GB
NUM_STEPS = 10


@dataclass(frozen=True)
class Verdict:
    """What was proved correct, and how long that took."""

    num_tasks: int
    num_events: int
    num_waits: int
    num_buffers: int
    num_ordered_pairs: int  # of accesses to the same bytes
    seconds: float


@no_collection()
def check(program: Program, on_step: Callable[[], None] = lambda: None) -> Verdict:
    """Prove `program` correct, and those that take turns with it. CheckError: they are not, with the first faults found, or they
    are too large to be proved.

    `on_step` is called NUM_STEPS times for each program, once after each step of the proof.
    """
    try:
        return _check_every(program.every, on_step)
    except CheckError:
        raise
    except Exception as error:  # a damaged program is refused, however it is damaged
        raise CheckError(f"the program cannot be read: {type(error).__name__}: {error}") from error


def check_with_progress(program: Program) -> Verdict:
    """`check`, with a bar over its steps."""
    with progress("proving the program") as steps:
        steps.expect(NUM_STEPS * len(program.every), " steps")
        return check(program, steps.add)


def _check_every(programs: Sequence[Program], on_step: Callable[[], None]) -> Verdict:
    found = [_check(program, shared_pieces(program, programs), on_step) for program in programs]
    if len(programs) > 1:
        findings = Findings()
        check_together(programs, [turn for _, turn in found], findings)
        findings.raise_any()
    verdicts = [verdict for verdict, _ in found]
    return Verdict(*(sum(values) for values in zip(*map(astuple, verdicts), strict=True)))


def _check(program: Program, shared: frozenset[Placed], on_step: Callable[[], None]) -> tuple[Verdict, Turn]:
    """`shared`: allocations that programs have that take turns with this one."""
    began = time.perf_counter()
    findings = Findings()
    check_headers(program, findings)
    findings.raise_any()
    tables = read_tables(program)
    on_step()
    check_structure(tables, findings)
    findings.raise_any()
    on_step()
    accesses = check_bounds(tables, findings)
    on_step()
    signals = check_thresholds(tables, findings)
    findings.raise_any()
    on_step()
    check_scopes(tables, findings)
    check_contents(tables, accesses, signals, findings)
    on_step()
    order = StartGraph(tables, signals).order(findings)
    _check_size(tables, findings)
    findings.raise_any()
    on_step()
    before = HappensBefore(tables, signals, accesses, order)
    on_step()
    check_counting(before, findings)
    if shared:
        check_turn(before, shared, findings)
    early = EarlyStart(before)
    on_step()
    num_pairs = check_races(before, early, findings)
    on_step()
    check_lamport(before, early, findings)
    findings.raise_any()
    on_step()
    verdict = Verdict(
        num_tasks=tables.num_tasks,
        num_events=tables.num_events,
        num_waits=len(tables.waits.task),
        num_buffers=len(accesses.allocations.every),
        num_ordered_pairs=num_pairs,
        seconds=time.perf_counter() - began,
    )
    return verdict, summarize(tables, accesses)


def _check_size(tables: ProgramTables, findings: Findings) -> None:
    """Vector clocks take tasks times chains: one chain a worker, two for every task outside the workers' own order."""
    num_unqueued = int((tables.tasks.worker < 0).sum())
    num_chains = tables.num_ranks * tables.num_workers + 2 * num_unqueued
    if 4 * tables.num_tasks * num_chains > MAX_CLOCK_BYTES:
        text = f"{tables.num_tasks} tasks on {num_chains} workers and dispatched tasks are too many to be proved"
        findings.add("size", text)
