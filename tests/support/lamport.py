"""Graphs with polled operands, and the verdicts of `check` and the oracle."""

from __future__ import annotations

from support.oracle import Oracle
from support.programs import refusal

from distmk.check import check
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.program.program import Program, compile_graph
from distmk.tasks import Affine, Put, Sum

COLS = 16


def taking(rank: int, op: str, worker: int | None, *blocks: Region, dst: Region) -> Sum:
    return Sum(rank, op, worker, blocks=blocks, dst=dst, polls_blocks=True)


def all_reduce(num_ranks: int, num_workers: int) -> Graph:
    """Two all-reduces through the same slots."""
    graph = Graph(num_ranks, num_workers)
    x, slots = graph.buffer("x", COLS), graph.buffer("slots", COLS * num_ranks, lamport=True)
    cuts = [(worker, worker * COLS // num_workers, (worker + 1) * COLS // num_workers) for worker in range(num_workers)]
    for layer in range(2):
        for rank in range(num_ranks):
            for to in range(num_ranks):
                for worker, begin, end in cuts:
                    dst = slots.at(to, rank * COLS + begin, rank * COLS + end)
                    graph.add(Put(rank, f"put{layer}", worker, src=x.at(rank, begin, end), dst=dst))
        for rank in range(num_ranks):
            for worker, begin, end in cuts:
                blocks = [slots.at(rank, r * COLS + begin, r * COLS + end) for r in range(num_ranks)]
                graph.add(taking(rank, f"sum{layer}", worker, *blocks, dst=x.at(rank, begin, end)))
    return graph


class Slots:
    """A rank that takes `b` from slots, to be given tasks."""

    def __init__(self, num_workers: int = 2, lamport: bool = True) -> None:
        self.graph = Graph(1, num_workers)
        self.a, self.b, self.c = (self.graph.buffer(name, COLS) for name in "abc")
        self.slots = self.graph.buffer("slots", COLS, lamport=lamport)

    def put(self, op: str, worker: int) -> None:
        self.graph.add(Put(0, op, worker, src=self.a.at(0), dst=self.slots.at(0)))

    def take(self, op: str, worker: int, dst: Buffer, end: int = COLS) -> None:
        self.graph.add(taking(0, op, worker, self.slots.at(0, 0, end), dst=dst.at(0, 0, end)))

    def copy(self, op: str, worker: int, src: Buffer, dst: Buffer) -> None:
        self.graph.add(Affine(0, op, worker, src=src.at(0), dst=dst.at(0)))

    def compile(self) -> Program:
        return compile_graph(self.graph)


def refused(program: Program, *also: str) -> str:
    """What check says, of a program that the oracle finds nothing else wrong with but `also`."""
    assert Oracle(program).faults == {"arrival", *also}
    text = refusal(program)
    assert {line.split(":")[0] for line in text.splitlines()[1:]} == {"arrival", *also}
    return text


def accepted(program: Program) -> None:
    check(program)
    assert not Oracle(program).faults
