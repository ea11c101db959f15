"""All tasks interpret the same bytes in the same way, and every byte that is read has been written.

Plain numbers may have any value. Two kinds of contents may not: indices (batch metadata, page tables, candidates), and
layouts that tasks compute for themselves (the splits of attention). They must come from a task that gives them the same
meaning; otherwise a body would access memory outside its buffers, which no other check can see.

The flow of data is checked for such contents in every program. If a program has a scheduler step, its tasks alone fill
its memory, and the flow of all data is checked. Only locations that tasks both read and write count. There, some task
must have written each byte that is read, and some task must read each byte that is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from distmk.check.bounds import Accesses, Span
from distmk.check.findings import Findings
from distmk.check.thresholds import Signals
from distmk.graph.task import ZEROS, Content
from distmk.program.program import decode_args
from distmk.program.reader import ProgramTables


def check_contents(tables: ProgramTables, accesses: Accesses, signals: Signals, findings: Findings) -> None:
    """Check how tasks interpret their bytes, which batch they work on, and the flow of data."""
    for by_content in accesses.contents.typed.values():
        if len(by_content) > 1:
            _check_agreement(by_content, accesses, findings)
    for location, writes in accesses.contents.untyped_writes.items():
        typed = accesses.contents.typed.get(location)
        if typed:
            _check_writers(typed, writes, accesses, findings)
    _check_batch(tables, accesses, signals, findings)
    _check_flow(accesses, signals.scheduler_step is not None, findings)


def _check_agreement(by_content: dict[Content, list[Span]], accesses: Accesses, findings: Findings) -> None:
    every = sorted((span.begin, span.end, content or ()) for content, spans in by_content.items() for span in spans)
    reach, holder = 0, every[0]
    for begin, end, content in every:
        if begin < reach and content != holder[2]:
            span = next(span for span in by_content[content] if (span.begin, span.end) == (begin, end))
            text = f"{accesses.describe(span)} is {_name(content)} for one task, and {_name(holder[2])} for another"
            findings.add("content", text)
        if end > reach:
            reach, holder = end, (begin, end, content)


def _check_writers(
    typed: dict[Content, list[Span]], writes: list[Span], accesses: Accesses, findings: Findings
) -> None:
    for content, spans in typed.items():
        for write in writes:
            if any(span.begin < write.end and write.begin < span.end for span in spans):
                findings.add(
                    "content", f"{accesses.describe(write)} is {_name(content)}, and a task writes numbers there"
                )


def _name(content: Content) -> str:
    name, *numbers = content or ("numbers",)
    return f"a {name} {tuple(numbers)}" if numbers else f"a {name}"


def _check_batch(tables: ProgramTables, accesses: Accesses, signals: Signals, findings: Findings) -> None:
    """If there is a scheduler step, all tasks and the iteration barriers work on its batch."""
    step = signals.scheduler_step
    batch = 0
    if step is not None:
        index = int(tables.descriptor_of[0][step - int(tables.first_task[0])])
        batch = int(decode_args(tables.ranks[0].tasks[index]).batch)
        for operand, task in accesses.batches.items():
            if operand not in (None, 0, batch):
                text = f"works on a batch at {operand}, and the scheduler step makes one at {batch}"
                findings.add("content", f"{tables.describe_task(task)} {text}")
    for rank, part in enumerate(tables.ranks):
        if part.header.iteration_batch != batch:
            text = f"rank {rank} begins iterations with a batch at {part.header.iteration_batch}, expected {batch}"
            findings.add("iteration barrier", text)


def _check_flow(accesses: Accesses, is_whole: bool, findings: Findings) -> None:
    """`is_whole`: the program's own tasks alone fill its memory."""
    reads: dict[int, list[Span]] = defaultdict(list)
    writes: dict[int, list[Span]] = defaultdict(list)
    if is_whole:
        for span in accesses.distinct:
            if not span.resets:
                (writes if span.write else reads)[span.location].append(span)
    else:
        for location, by_content in accesses.contents.typed.items():
            for content, spans in by_content.items():
                for span in spans:
                    if not span.resets and content != ZEROS:
                        (writes if span.write else reads)[location].append(span)
    for location in reads.keys() & writes.keys():
        for spans, others, text in (
            (reads[location], writes[location], "is read, and no task writes it"),
            (writes[location], reads[location], "is written, and no task reads it"),
        ):
            missing = _not_covered(spans, others)
            if missing:
                findings.add("flow", f"{accesses.describe(missing)} {text}")


def _not_covered(spans: Iterable[Span], by: list[Span]) -> Span | None:
    """The first span that `by` does not cover completely."""
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted({(span.begin, span.end) for span in by}):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    for span in spans:
        at = bisect_right(begins, span.begin) - 1
        if at < 0 or span.end > ends[at]:
            return span
    return None
