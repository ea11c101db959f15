"""Moments at which single tasks are run: boards of all bodies, and decode programs in the midst of a launch."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from support.bodies.board import Board
from support.bodies.cases import HOST, _linear, _small
from support.mutants.programs import subject
from support.mutants.sandbox import each_in_child, initial, run
from support.mutants.watched import Moment

from distmk.abi import Space
from distmk.testing.memory import RankMemory

SMALL_K = (1, 17, 63, 64)  # of linear tasks


def board_moment(seed: int, num_ranks: int) -> Moment:
    """All bodies but attention's with shapes drawn at random."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    board = Board(rng, num_ranks, num_workers=3, gpu_layout=False)
    for case in [*_linear(board, HOST._replace(k=SMALL_K, n=(1, 3, 7, 16), repeats=1)), *_small(board)]:
        case()
    program = board.compile()
    images = {}
    for rank, part in enumerate(program.ranks):
        memory = RankMemory(program, rank)
        parts = {space: np.zeros(extent.whole.num_bytes, np.uint8) for space, extent in memory.extents.items()}
        memory.poison(parts, rng)
        for buffer, content in memory.buffers(parts).items():
            for cols, raw in board._given.get((rank, buffer), []):
                content[: len(raw), cols] = raw
        for weight, placed in program.placement.weights.items():
            if weight.rank == rank:
                rows = memory.extents[Space.LOCAL].rows_of(placed, parts[Space.LOCAL])
                rows.reshape(-1)[:] = np.ascontiguousarray(weight.data).view(np.uint8).reshape(-1)
        for space, size in ((Space.HEAP, part.header.heap_bytes), (Space.LOCAL, part.header.local_bytes)):
            whole = np.zeros(size, np.uint8)
            whole[memory.extents[space].whole.offset :][: len(parts[space])] = parts[space]
            images[(int(space), rank)] = whole
    return Moment(program, images)


def decode_moment(library: ctypes.CDLL, kind: str, num_iterations: int) -> Moment:
    """A decode program after so many iterations of a launch."""
    made = subject(kind)
    if not num_iterations:
        return Moment(made.program, initial(made, made.program), 0)
    ((_, outcome),) = each_in_child([lambda: run(library, made, made.program, False, num_iterations=num_iterations)])
    assert not isinstance(outcome, str), outcome
    return Moment(made.program, outcome.images, num_iterations)
