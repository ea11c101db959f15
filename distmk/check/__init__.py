"""Proof that a compiled program is correct, from its encoded bytes alone, before it may run.

Each module settles what the next relies on: `view` that headers, sections and queues can be read at all; `memory` that
every access lies in one placed buffer; `waits` that every wait can be met and nothing waits in a circle; `order` that
counts stand for their tasks; `races` that no two conflicting accesses can meet; `arrivals` that what is read before a
task's waits are met is zero or right. What put the waits there is not consulted.

A waiter is after all tasks that trigger its event, with one reservation: a push fires its rank's events together with
the data, when the task has read all it reads but has perhaps not written to the other ranks yet. What such a task
leaves on a rank is known by an event of that rank, or to whoever knows that the task is done: later tasks of its
worker, and waiters for an event that it fires without a push.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from distmk.check.findings import Findings
from distmk.check.lamport import Arrivals
from distmk.check.memory import Memory
from distmk.check.order import MAX_TABLE_BYTES, Order, check_counting
from distmk.check.races import Races
from distmk.check.starts import Starts
from distmk.check.view import View, check_headers
from distmk.check.waits import Signals, StartOrder
from distmk.errors import CheckError
from distmk.program.program import Program


@dataclass(frozen=True)
class Verdict:
    """What was proved correct, and how long that took."""

    num_tasks: int
    num_events: int
    num_waits: int
    num_buffers: int
    num_ordered_pairs: int  # of accesses to the same bytes that were found to be ordered
    seconds: float


def check(program: Program) -> Verdict:
    """Prove `program` correct; CheckError, listing what is wrong with it, if that cannot be done."""
    try:
        return _check(program)
    except CheckError:
        raise
    except Exception as error:  # a damaged program is refused, however it is damaged
        raise CheckError(f"the program cannot be read: {type(error).__name__}: {error}") from error


def _check(program: Program) -> Verdict:
    began = time.perf_counter()
    findings = Findings()
    check_headers(program, findings)
    findings.raise_any()
    view = View(program, findings)
    findings.raise_any()
    memory = Memory(view, findings)
    touched, targets = memory.spans()
    signals = Signals(view, findings)
    findings.raise_any()
    start_order = StartOrder(view, signals).order(findings)
    _check_size(view, findings)
    findings.raise_any()
    order = Order(view, signals, memory, start_order, targets)
    check_counting(order, findings)
    starts = Starts(order, touched)
    Races(order, starts, touched, findings).run()
    Arrivals(order, starts, touched, findings).run()
    findings.raise_any()
    return Verdict(
        num_tasks=view.num_tasks,
        num_events=view.num_events,
        num_waits=len(view.wait_task),
        num_buffers=len(memory.pieces),
        num_ordered_pairs=order.num_pairs,
        seconds=time.perf_counter() - began,
    )


def _check_size(view: View, findings: Findings) -> None:
    """Clocks grow with tasks times workers."""
    num_loose = int((view.worker < 0).sum())
    num_chains = view.num_ranks * view.num_workers + 2 * num_loose
    if 4 * view.num_tasks * num_chains > MAX_TABLE_BYTES:
        text = f"{view.num_tasks} tasks on {num_chains} workers and handed-out tasks are too many to be proved"
        findings.add("size", text)
