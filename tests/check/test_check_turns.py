"""`check` on programs that take turns: what they have in common, and that none is under way when another one has its turn."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from support.mutate_spread import same_task
from support.programs import SMALLEST, complaint, find, refusal

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, MAX_SEQUENCES, JobBatch, split_operand
from distmk.check import check
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.layout import Placed
from distmk.program.program import Program, compile_graph, decode_args
from distmk.tasks import Linear, ReduceRows
from distmk.tasks.activations import activation_cols

CONFIG = dataclasses.replace(SMALLEST, num_heads=6, num_kv_heads=3)


def programs(
    num_ranks: int = 2,
    num_workers: int = 2,
    tiled: bool = False,
    more_rows: tuple[int, ...] = (MAX_BUCKET_ROWS,),
    max_seqs: int = MAX_ROWS,
) -> Program:
    buckets = (MAX_ROWS, *more_rows)
    options = DecodeOptions(
        num_ranks, num_workers, max_seqs=max_seqs, max_model_len=64, tiled=tiled, row_buckets=buckets
    )
    return compile_graph(*lower_programs(build_model(CONFIG), options))


def piece_of(program: Program, name: str) -> Placed:
    return next(piece for piece in program.placement.pieces if piece.name == name)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_accepted(num_ranks: int, tiled: bool) -> None:
    cases = [
        (1, (MAX_BUCKET_ROWS,), MAX_SEQUENCES),
        (5, (40,), MAX_ROWS),
        (2, (40,), 33),
        (2, (40, 128, MAX_BUCKET_ROWS), 33),
    ]
    for num_workers, more_rows, max_seqs in cases:
        program = programs(num_ranks, num_workers, tiled, more_rows, max_seqs)
        alone = [check(dataclasses.replace(each, others=())) for each in program.every]
        assert check(program).num_tasks == sum(verdict.num_tasks for verdict in alone)


def indices(program: Program) -> None:
    for part in program.ranks:
        part.header.index = 1
    for part in program.others[0].ranks:
        part.header.index = 0


def index_of_one_rank(program: Program) -> None:
    program.others[0].ranks[1].header.index = 0


def order_of_programs(program: Program) -> None:
    """The job program begins, and all numbers are right."""
    (jobs,) = program.others
    slabs = dataclasses.replace(program, others=())
    program.ranks, program.placement, program.others = jobs.ranks, jobs.placement, (slabs,)
    for number, each in enumerate(program.every):
        decode_args(find(each, "scheduler_step")).program = number
        for part in each.ranks:
            part.header.index = number


def step(field: str, number: int, by: int) -> Callable[[Program], None]:
    def damage(program: Program) -> None:
        args = decode_args(find(program.every[number], "scheduler_step"))
        setattr(args, field, getattr(args, field) + by)

    return damage


def batch_of(number: int, other: int) -> Callable[[Program], None]:
    """The step of a program has its own batch in place of another one's."""

    def damage(program: Program) -> None:
        args = decode_args(find(program.every[number], "scheduler_step"))
        args.batches[other] = args.batch

    return damage


def rows_of(number: int, other: int, by: int) -> Callable[[Program], None]:
    def damage(program: Program) -> None:
        args = decode_args(find(program.every[number], "scheduler_step"))
        args.max_rows[other] += by

    return damage


def heap_bytes(program: Program) -> None:
    (jobs,) = program.others
    for part in jobs.ranks:
        part.header.heap_bytes += 256
    jobs.placement = dataclasses.replace(jobs.placement, heap_bytes=jobs.placement.heap_bytes + 256)


def events(program: Program) -> None:
    """Both programs count their events in the same place."""
    (jobs,) = program.others
    begin = program.placement.events_heap_offset
    for part in jobs.ranks:
        part.header.events_heap_offset = begin
    jobs.placement = dataclasses.replace(jobs.placement, events_heap_offset=begin)


def rings(program: Program) -> None:
    """The rings of the job program are those of the slab program."""
    (jobs,) = program.others
    begin = program.placement.rings_heap_offset
    for part in jobs.ranks:
        part.header.rings_heap_offset = begin
    jobs.placement = dataclasses.replace(jobs.placement, rings_heap_offset=begin)


def onto(name: str, other: str) -> Callable[[Program], None]:
    """An allocation of the slab program on top of one of the job program's, with all operands that point there."""

    def damage(program: Program) -> None:
        moved, target = piece_of(program, name), piece_of(program.others[0], other)
        assert moved.space == target.space and moved.num_bytes <= target.num_bytes
        for part in program.ranks:
            for desc in part.tasks:
                args = decode_args(desc)
                for field, kind, *_ in args._fields_:
                    space, offset = split_operand(getattr(args, field)) if kind is ctypes.c_uint64 else (-1, 0)
                    if space == moved.space and 0 <= offset - moved.offset < moved.num_bytes:
                        setattr(args, field, getattr(args, field) + target.offset - moved.offset)
        pieces = (dataclasses.replace(p, offset=target.offset) if p is moved else p for p in program.placement.pieces)
        program.placement = dataclasses.replace(program.placement, pieces=tuple(pieces))

    return damage


FAULTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "numbers": (indices, "program 0 says on rank 0 that it is number 1"),
    "number of a rank": (index_of_one_rank, "program 1 says on rank 1 that it is number 0"),
    "order": (order_of_programs, "arguments cannot be read"),
    "number of a step": (step("program", 0, 1), "the batches are not those of the programs"),
    "batch of the first step": (batch_of(0, 1), "bounds: "),
    "batch of the second step": (batch_of(1, 0), "overlap: scheduler_step (rank 0, dispatched) writes"),
    "fewer programs": (step("num_programs", 0, -1), "program 1 has another num_programs than that of program 0"),
    "rows of the first step": (rows_of(0, 1, -8), "program 1 has another max_rows than that of program 0"),
    "rows of the second step": (rows_of(1, 0, -8), "program 1 has another max_rows than that of program 0"),
    "own rows": (rows_of(1, 1, -8), "program 1 has another max_rows than that of program 0"),
    "slots": (step("max_slots", 1, -1), "program 1 has another max_slots than that of program 0"),
    "size of the heap": (heap_bytes, "program 1 has another heap_bytes on rank 0 than program 0"),
    "events": (events, "events of program"),
    "rings": (rings, "of program"),
    "local memory": (onto("x", "job_q"), "of the local memory, inside x"),
    "heap": (onto("sampled16", "job_parts"), "of the heap memory, inside sampled16"),
}


@pytest.mark.parametrize(("damage", "says"), FAULTS.values(), ids=FAULTS)
def test_refused(damage: Callable[[Program], None], says: str) -> None:
    program = programs()
    damage(program)
    assert says in refusal(program)


def test_batches_of_other_programs() -> None:
    """The first program's step has the batches of the second and the third, which are alike, in each other's place."""
    program = programs(more_rows=(40, 100))
    batches = decode_args(find(program, "scheduler_step")).batches
    batches[1], batches[2] = batches[2], batches[1]
    assert "program 1 has another batches than that of program 0" in complaint(program)


def test_each_wait_of_a_step_counts() -> None:
    """Without any one wait of a scheduler step, some task may be under way when the turn ends, or two iterations race."""
    said = set()
    for number in (0, 1, 2):
        for at in range(find(programs(more_rows=(40, 100)).every[number], "scheduler_step").num_waits):
            program = programs(more_rows=(40, 100))
            part = program.every[number].ranks[0]
            desc = find(program.every[number], "scheduler_step")
            last = desc.wait_begin + desc.num_waits - 1
            part.waits[desc.wait_begin + at] = type(part.waits[last]).from_buffer_copy(part.waits[last])
            for copy in same_task(part, desc):
                copy.num_waits -= 1
            text = complaint(program)
            assert text, f"wait {at} of program {number}"
            said.add("turn of its program ends" in text)
    assert True in said


def test_nothing_streams_into_memory_that_bodies_use() -> None:
    """A linear task's weights would be copied over what reduce_rows keeps in the pipeline's memory on a GPU."""
    graph = Graph(1, 1)
    x, out = graph.buffer("x", 64, dtype="bf16"), graph.buffer("out", 8)
    slab = graph.constant("weight", 0, np.zeros((8, 64), np.uint16))
    graph.add(Linear(0, "linear", 0, x=x.at(0), slab=slab, out=out.at(0)))
    assert not complaint(compile_graph(graph))
    batch = graph.buffer("batch", ctypes.sizeof(JobBatch), dtype="u8")
    parts, rows = graph.buffer("parts", 64, rows=MAX_BUCKET_ROWS), graph.buffer("rows", 64, rows=MAX_BUCKET_ROWS)
    sums = graph.buffer("sums", activation_cols(64, False), dtype="bf16")
    graph.add(ReduceRows(0, "sum", parts=parts.at(0), x=rows.at(0), out=sums.at(0), batch=batch.at(0)))
    assert "into which linear (rank 0, worker 0) streams" in refusal(compile_graph(graph))
