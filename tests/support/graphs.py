"""Small task graphs of many shapes, and random ones."""

from __future__ import annotations

import ctypes
import random

import numpy as np

from distmk.abi import Batch, Epilogue, LaunchKind, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.tasks import Affine, Linear, Nop, Put, Sine, Sum

COLS = 16
SLOW = 300  # sines one after the other, in a task that is to take long


def ring(num_ranks: int, num_workers: int) -> Graph:
    """Each rank scales its vector and puts it to the next rank."""
    graph = Graph(num_ranks, num_workers)
    have, got = graph.buffer("have", COLS), graph.buffer("got", COLS)
    for rank in range(num_ranks):
        graph.add(Affine(rank, "scale", src=got.at(rank), dst=have.at(rank), scale=2.0))
    for rank in range(num_ranks):
        graph.add(Put(rank, "send", src=have.at(rank), dst=got.at((rank + 1) % num_ranks)))
    return graph


def all_reduce(num_ranks: int, num_workers: int) -> Graph:
    """Two all-reduces one after the other, each of two blocks, by puts."""
    graph = Graph(num_ranks, num_workers)
    x = graph.buffer("x", COLS)
    for layer in range(2):
        slots = graph.buffer(f"slots{layer}", COLS * num_ranks)
        half = COLS // 2
        for rank in range(num_ranks):
            for to in range(num_ranks):
                for begin in (0, half):
                    src = x.at(rank, begin, begin + half)
                    dst = slots.at(to, rank * COLS + begin, rank * COLS + begin + half)
                    graph.add(Put(rank, f"put{layer}", src=src, dst=dst))
        for rank in range(num_ranks):
            for begin in (0, half):
                blocks = tuple(slots.at(rank, r * COLS + begin, r * COLS + begin + half) for r in range(num_ranks))
                graph.add(Sum(rank, f"sum{layer}", blocks=blocks, dst=x.at(rank, begin, begin + half)))
    return graph


def push_linear(graph: Graph, rank: int, x: Region, out: Region, op: str, batch: Region | None = None) -> Linear:
    """A linear that pushes its block to every rank."""
    rows = 16 if batch else 1
    weight = graph.constant(f"{op}.w{len(graph.tasks)}", rank, np.zeros((out.cols // rows, x.cols), np.uint16))
    return graph.add(
        Linear(rank, op, x=x, slab=weight, out=out, batch=batch, epilogue=Epilogue.PUSH, num_ranks=graph.num_ranks)
    )


def push_reduce(num_ranks: int, num_workers: int) -> Graph:
    """Row-parallel linears that push blocks of 16 rows into every rank's slots, where they are summed."""
    graph = Graph(num_ranks, num_workers)
    batch = graph.buffer("batch", ctypes.sizeof(Batch), dtype="u8")
    total = graph.buffer("total", 8, rows=16)
    x, y = (graph.buffer(name, 8, rows=16, dtype="bf16") for name in "xy")
    block = 4 * 16
    for layer in range(2):
        src, dst = (x, y) if layer == 0 else (y, x)
        slots = graph.buffer(f"slots{layer}", 2 * block * num_ranks)
        for rank in range(num_ranks):
            for part in range(2):
                begin = (2 * rank + part) * block
                out = slots.at(rank, begin, begin + block)
                push_linear(graph, rank, src.at(rank), out, f"push{layer}", batch.at(rank))
        for rank in range(num_ranks):
            for part in range(2):
                begins = [(2 * r + part) * block for r in range(num_ranks)]
                blocks = tuple(slots.at(rank, begin, begin + block) for begin in begins)
                to, out_bf16 = (buffer.at(rank, 4 * part, 4 * part + 4) for buffer in (total, dst))
                graph.add(
                    Sum(
                        rank,
                        f"sum{layer}",
                        blocks=blocks,
                        dst=to,
                        out_bf16=out_bf16,
                        batch=batch.at(rank),
                        accumulates=layer > 0,
                    )
                )
    return graph


def pipeline(num_ranks: int, num_workers: int) -> Graph:
    """Stages on successive ranks; only back-pressure keeps the first from running ahead."""
    graph = Graph(num_ranks, num_workers)
    stages = [
        (graph.buffer(f"in{s}", COLS), graph.buffer(f"out{s}", COLS, space=Space.LOCAL)) for s in range(num_ranks)
    ]
    seed = graph.buffer("seed", COLS)
    for s, (into, out) in enumerate(stages):
        graph.add(Affine(s, f"stage{s}", src=into.at(s) if s else seed.at(0), dst=out.at(s)))
        if s + 1 < num_ranks:
            graph.add(Put(s, f"pass{s}", src=out.at(s), dst=stages[s + 1][0].at(s + 1)))
    return graph


def handed_out(num_ranks: int, num_workers: int) -> Graph:
    """Single and massive launches between ahead-of-time tasks."""
    graph = Graph(num_ranks, num_workers)
    a, b, c = (graph.buffer(name, COLS) for name in "abc")
    for rank in range(num_ranks):
        graph.add(Affine(rank, "first", src=c.at(rank), dst=a.at(rank)))
        graph.add(Affine(rank, "single", launch=LaunchKind.SINGLE, src=a.at(rank), dst=b.at(rank)))
        graph.add(Affine(rank, "massive", launch=LaunchKind.MASSIVE, src=b.at(rank), dst=c.at(rank)))
        graph.add(Put(rank, "away", src=c.at(rank), dst=a.at((rank + 1) % num_ranks)))
    return graph


def spread(num_ranks: int, num_workers: int) -> Graph:
    """Spread tasks between ahead-of-time ones of one worker after another, and before a massive launch."""
    graph = Graph(num_ranks, num_workers)
    a, b, c, d = (graph.buffer(name, COLS) for name in "abcd")
    for rank in range(num_ranks):
        graph.add(Affine(rank, "first", src=d.at(rank), dst=a.at(rank)))
        graph.add(Affine(rank, "spread", launch=LaunchKind.SPREAD, src=a.at(rank), dst=b.at(rank)))
        graph.add(Affine(rank, "between", src=b.at(rank), dst=c.at(rank)))
        graph.add(Affine(rank, "again", launch=LaunchKind.SPREAD, src=c.at(rank), dst=b.at(rank)))
        graph.add(Affine(rank, "massive", launch=LaunchKind.MASSIVE, src=b.at(rank), dst=c.at(rank)))
        graph.add(Put(rank, "away", src=c.at(rank), dst=d.at((rank + 1) % num_ranks)))
    return graph


def overtaken(num_ranks: int, num_workers: int) -> Graph:
    """Worker 0 is dispatched a task that comes before its own in program order, but has to wait for longer."""
    graph = Graph(num_ranks, num_workers)
    a, b, c, d, e = (graph.buffer(name, COLS) for name in "abcde")
    for rank in range(num_ranks):
        other = min(1, num_workers - 1)
        graph.add(Affine(rank, "quick", worker=other, src=c.at(rank), dst=a.at(rank), scale=0.5, shift=1.0))
        graph.add(Sine(rank, "slow", worker=other, src=a.at(rank), dst=b.at(rank), times=SLOW))
        graph.add(Affine(rank, "single", launch=LaunchKind.SINGLE, src=b.at(rank), dst=c.at(rank), shift=2.0))
        graph.add(Affine(rank, "own", worker=0, src=a.at(rank), dst=d.at(rank), scale=3.0))
        graph.add(Affine(rank, "last", worker=0, src=d.at(rank), dst=e.at(rank), shift=-1.0))
    return graph


SHAPES = {f.__name__: f for f in (ring, all_reduce, push_reduce, pipeline, handed_out, spread, overtaken)}


def _overlap(a: Region, b: Region) -> bool:
    """Whether two regions have some columns in common, but are not the same."""
    return a[:2] == b[:2] and a != b and a.begin < b.end and b.begin < a.end


def _some(random_: random.Random, buffer: Buffer, rank: int, cols: int) -> Region:
    begin = random_.randrange(0, COLS - cols + 1, 2)
    return buffer.at(rank, begin, begin + cols)


def random_graph(random_: random.Random) -> Graph:
    """Random copies, puts, sums and pushes between pieces of a few buffers; every shared buffer is read at the end."""
    num_ranks, num_workers = random_.randint(1, 4), random_.randint(1, 3)
    graph = Graph(num_ranks, num_workers, random_.randint(1, num_workers))
    local = [graph.buffer(f"local{i}", COLS, space=Space.LOCAL) for i in range(random_.randint(1, 2))]
    shared = [graph.buffer(f"heap{i}", COLS) for i in range(random_.randint(1, 3))]
    wide = graph.buffer("wide", COLS, rows=4)
    halves = graph.buffer("halves", COLS, dtype="bf16", space=Space.LOCAL)
    every = local + shared
    for index in range(random_.randint(2, 14)):
        rank, cols = random_.randrange(num_ranks), random_.choice([2, 4, 8, 16])
        op, choice = f"t{index}", random_.random()
        worker = None if random_.random() < 0.5 else random_.randrange(num_workers)
        src = _some(random_, random_.choice(every), rank, cols)
        dst = _some(random_, random_.choice(every), rank, cols)
        if _overlap(src, dst):  # a task must not write a part of what it reads
            dst = src
        if choice < 0.3:
            kinds = [LaunchKind.AHEAD, LaunchKind.SINGLE, LaunchKind.MASSIVE, LaunchKind.SPREAD]
            launch = random_.choices(kinds, [6, 2, 1, 3])[0]
            graph.add(Affine(rank, op, worker if launch is LaunchKind.AHEAD else None, launch, src=src, dst=dst))
        elif choice < 0.6:
            to = _some(random_, random_.choice(shared), random_.randrange(num_ranks), cols)
            if _overlap(src, to):
                to = src
            graph.add(Put(rank, op, worker, src=src, dst=to))
        elif choice < 0.75:
            block, n = random_.choice(every), random_.choice([1, 2])
            blocks = tuple(block.at(rank, b * cols // n, (b + 1) * cols // n) for b in range(n))
            to = random_.choice([each for each in (wide, *every) if each is not block]).at(rank, 0, cols // n)
            out_bf16 = _some(random_, halves, rank, cols // n) if random_.random() < 0.5 else None
            graph.add(
                Sum(rank, op, worker, blocks=blocks, dst=to, out_bf16=out_bf16, accumulates=random_.random() < 0.3)
            )
        elif choice < 0.95:
            x = _some(random_, halves, rank, cols)
            task = push_linear(graph, rank, x, _some(random_, random_.choice(shared), rank, cols), op)
            if random_.random() < 0.3:
                object.__setattr__(task, "launch", LaunchKind.SINGLE)
                object.__setattr__(task, "worker", None)
        else:
            graph.add(Nop(rank, op, worker, inputs=(src,), outputs=(dst,)))
    for rank in range(num_ranks):
        for index, buffer in enumerate(shared):
            # Read what was pushed, so that it may be overwritten in the next iteration.
            sink = graph.buffers[-1] if index or rank else graph.buffer("sink", COLS, space=Space.LOCAL)
            graph.add(Affine(rank, f"end{index}", src=buffer.at(rank), dst=sink.at(rank)))
    return graph
