"""Programs of several row buckets: each is proved by itself; here it is proved that none finds another one still running.

The programs share memory, and iterations of one may follow iterations of another. The scheduler step ends a program's
turn: it makes the batch of the next iteration, which may be another program's. So every task that accesses memory of
several programs must happen before the next scheduler step of its own program. Then each program finds this memory as
if the tasks of all others had run between two of its iterations. All other memory belongs to one program.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmk.abi import MAX_PROGRAMS, LaunchKind, Space
from distmk.check.allocations import protocol_areas
from distmk.check.bounds import Accesses
from distmk.check.findings import Findings
from distmk.check.happens_before import READ, HappensBefore
from distmk.graph.task import Content
from distmk.program.layout import Placed
from distmk.program.program import Program, decode_args
from distmk.program.reader import ProgramTables

SAME_IN_ALL = ("num_ranks", "num_workers", "num_schedulers", "zeroed_heap_bytes", "heap_bytes", "local_bytes", "host")
SAME_IN_ALL_STEPS = (
    "page_table", "state", "slots", "num_ranks", "page_size", "max_pages", "num_pages", "max_slots", "max_positions",
    "num_programs", "batches", "max_rows", "drafts", "max_drafts", "row_cost",
)  # fmt: skip
Contents = dict[Placed, set[Content]]


@dataclass(frozen=True)
class Turn:
    """The facts about a proved program that the checks across programs need."""

    protocol: list[tuple[int, int, str]]  # areas of the heap in front of the buffers: offset, bytes, name
    contents: Contents  # by allocation: how tasks interpret its bytes


def shared_pieces(program: Program, every: Sequence[Program]) -> frozenset[Placed]:
    """The allocations of `program` that other programs have, too."""
    others = {piece for other in every if other is not program for piece in other.placement.pieces}
    return frozenset(others & set(program.placement.pieces))


def check_turn(before: HappensBefore, shared: frozenset[Placed], findings: Findings) -> None:
    """All accesses to memory that other programs share have happened when the program's next scheduler step begins."""
    step, tables, accesses = before.signals.scheduler_step, before.tables, before.accesses
    if step is None:
        findings.add("turns", "a program that takes turns has no scheduler step")
        return
    wanted = {
        index for index, piece in enumerate(accesses.allocations.every) if piece in shared and not piece.read_only
    }
    num_ranks = tables.num_ranks
    for task, spans in enumerate(accesses.spans):
        if task == step:
            continue
        done = {
            span.location % num_ranks if span.write else READ for span in spans if span.location // num_ranks in wanted
        }
        for rank in done:
            if not before.after_one(step + tables.num_tasks, task, rank):
                text = f"{tables.describe_task(task)} may be under way when the turn of its program ends"
                findings.add("turns", f"{text}, and it accesses memory of another program")
                break


def summarize(tables: ProgramTables, accesses: Accesses) -> Turn:
    """Collect what `check_together` needs to know about a program."""
    every, num_ranks = accesses.allocations.every, tables.num_ranks
    contents: Contents = {}
    for location, by_content in accesses.contents.typed.items():
        contents.setdefault(every[location // num_ranks], set()).update(by_content)
    return Turn(protocol_areas(tables), contents)


def check_together(programs: Sequence[Program], turns: Sequence[Turn], findings: Findings) -> None:
    """Check that numbers, headers, scheduler steps, memory and its contents agree between all programs."""
    if len(programs) > MAX_PROGRAMS:
        findings.add("turns", f"{len(programs)} programs take turns; there can be {MAX_PROGRAMS}")
        return
    for index, program in enumerate(programs):
        for rank, part in enumerate(program.ranks):
            first = programs[0].ranks[rank].header
            if part.header.index != index:
                findings.add("turns", f"program {index} says on rank {rank} that it is number {part.header.index}")
            for field in SAME_IN_ALL:
                if getattr(part.header, field) != getattr(first, field):
                    findings.add("turns", f"program {index} has another {field} on rank {rank} than program 0")
    findings.raise_any()
    _check_steps(programs, findings)
    _check_apart(programs, turns, findings)
    for one, other in itertools.combinations(turns, 2):
        for piece in one.contents.keys() & other.contents.keys():
            mine, its = one.contents[piece], other.contents[piece]
            if not (mine <= its or its <= mine):
                findings.add("turns", f"tasks of two programs take the bytes of {piece.name} for different things")


def _check_steps(programs: Sequence[Program], findings: Findings) -> None:
    steps = [_step_of(program) for program in programs]
    for index, step in enumerate(steps):
        for field in SAME_IN_ALL_STEPS:
            if _value(step, field) != _value(steps[0], field):
                findings.add(
                    "turns", f"the scheduler step of program {index} has another {field} than that of program 0"
                )
        if step.program != index:
            findings.add("turns", f"the scheduler step of program {index} is for program {step.program}")
        if step.num_programs != len(programs):
            findings.add(
                "turns", f"the scheduler step of program {index} knows {step.num_programs} of {len(programs)} programs"
            )


def _value(step: Any, field: str) -> Any:
    value = getattr(step, field)
    return tuple(value) if isinstance(value, ctypes.Array) else value


def _step_of(program: Program) -> Any:
    part = program.ranks[0]
    return decode_args(next(desc for desc in part.tasks if desc.launch == LaunchKind.SCHEDULER))


def _check_apart(programs: Sequence[Program], turns: Sequence[Turn], findings: Findings) -> None:
    """Two programs share an allocation or have no byte of it in common. Each program has its own events and rings."""
    for rank in range(programs[0].num_ranks):
        for space in (Space.HEAP, Space.LOCAL):
            areas: dict[tuple[int, int, str], None] = {}
            for index, (program, turn) in enumerate(zip(programs, turns, strict=True)):
                pieces = (p for p in program.placement.pieces if p.space == space and p.rank in (-1, rank))
                areas |= dict.fromkeys((p.offset, p.num_bytes, p.name) for p in pieces)
                if space is Space.HEAP:
                    areas |= {(at, size, f"{name} of program {index}"): None for at, size, name in turn.protocol if at}
            reach, holder = 0, ""
            for offset, num_bytes, name in sorted(areas):
                if num_bytes and offset < reach:
                    findings.add(
                        "turns", f"{name} begins at {offset} of the {space.name.lower()} memory, inside {holder}"
                    )
                if offset + num_bytes > reach:
                    reach, holder = offset + num_bytes, name
