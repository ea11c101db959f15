"""Proof that a compiled program is correct, from its encoded bytes alone, before it may run.

Each module proves one property and may rely on the modules before it:

- `headers`: headers agree with the sections, with the memory layout and between ranks.
- `structure`: every reference points at something; every worker runs the tasks it should, once.
- `allocations`: allocations lie inside their memory and do not overlap.
- `bounds`: every access lies inside one allocation.
- `contents`: all tasks interpret the same bytes in the same way.
- `scopes`: signals across ranks have system scope.
- `thresholds`: every wait's threshold is the amount by which its event grows in an iteration.
- `deadlock`: no tasks wait in a circle.
- `happens_before`: vector clocks of two iterations.
- `counting`: when an event reaches its count, all of its producers have signaled.
- `early_start`: the vector clock at which a task may start before its waits are met.
- `turns`: a program never finds a task of another row bucket's program still running.
- `races`: conflicting accesses are ordered.
- `lamport`: polled elements are zero or right.

The proof uses neither the graph nor the code that derived the waits.

A task that waits for an event starts after all tasks that trigger the event. Pushes are the exception. A push signals
the events of the receiving rank together with the data. At that moment the pushing task has read all that it reads, but
its writes to other ranks may still be under way. A waiter for an event of a rank knows that the pushed data of that
rank has landed. A later task of the same worker, or a waiter for an event that is signaled without a push, knows that
the whole task is done.
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
from distmk.console import tell
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
    """The size of a proved program, and the time that the proof took."""

    num_tasks: int
    num_events: int
    num_waits: int
    num_buffers: int
    num_ordered_pairs: int  # pairs of accesses to the same bytes
    seconds: float


@no_collection()
def check(program: Program, on_step: Callable[[], None] = lambda: None) -> Verdict:
    """Prove that `program` and the programs of its other row buckets are correct.

    CheckError: a program is wrong (with the first faults found), or the programs are too large to be proved.

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
        verdict = check(program, steps.add)
    tell(f"proved {verdict.num_tasks} tasks in {verdict.seconds:.1f} s", "debug")
    return verdict


def _check_every(programs: Sequence[Program], on_step: Callable[[], None]) -> Verdict:
    proved = [_check(program, shared_pieces(program, programs), on_step) for program in programs]
    if len(programs) > 1:
        findings = Findings()
        check_together(programs, [turn for _, turn in proved], findings)
        findings.raise_any()
    verdicts = [verdict for verdict, _ in proved]
    return Verdict(*(sum(values) for values in zip(*map(astuple, verdicts), strict=True)))


def _check(program: Program, shared: frozenset[Placed], on_step: Callable[[], None]) -> tuple[Verdict, Turn]:
    """`shared`: allocations that the programs of other row buckets have, too."""
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
    """The vector clocks take `num_tasks * num_chains` elements.

    Each worker is a chain, and each task outside the workers' queues makes two.
    """
    num_unqueued = int((tables.tasks.worker < 0).sum())
    num_chains = tables.num_ranks * tables.num_workers + 2 * num_unqueued
    if 4 * tables.num_tasks * num_chains > MAX_CLOCK_BYTES:
        text = f"{tables.num_tasks} tasks on {num_chains} workers and dispatched tasks are too many to be proved"
        findings.add("size", text)
