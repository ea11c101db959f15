"""Constants, enumerations and operands shared with csrc."""

from __future__ import annotations

import enum

MAGIC = 0x31304B4D54534944  # "DISTMK01"
SPACE_SHIFT = 56
MAX_ROWS = 16  # token rows an iteration can carry
MAX_RANKS = 64
EVENT_STRIDE_BYTES = 64  # one event a cache line: counters on one line would make waiters slow each other down
TASK_ARGS_BYTES = 160
NO_EVENT = 0xFFFFFFFF
# How a GPU streams weights (distmk/weights/packing.py, csrc/device/core/pipeline.cuh).
M_TILE = 16
K_TILE = 256  # columns of a tile: 8 KB, the least that a bulk copy must have to be fast
N_TILE = 8  # tokens of a tensor-core product; a body that polls writes up to so many rows before its waits are met
M_TILES_PER_BLOCK = 4  # groups of M_TILE rows whose sums are kept at once
K_TILES_PER_BLOCK = 8  # tiles of a row in a block: one a warp, which loads activations for its own
COMBINE_SLICE = 32  # elements of a head that are merged at once
PARTIAL_HEADER_FLOATS = 4  # floats before a partial result's elements of a slice: maximum, sum, none, none
PARTIAL_FLOATS = PARTIAL_HEADER_FLOATS + COMBINE_SLICE
MAX_FUSED_COMBINE_COLS = 4096  # of a lone row that is merged by who multiplies it
COMBINE_WIDTH = 8  # that are merged in one go
FUSED_PARTIAL_HEADER = (
    8  # bf16 places before a split's result of a lone row: the log of its weight as a float, and none
)
POSITIONS_PER_PASS = (
    128  # positions of an instance of attention that a GPU's warps take before they turn to memory again
)
MARKED_TASKS = 64  # of a worker: the last ones, of which its warps write down when they got where
MARKED_WORKERS = 256
MARK_WORDS = 16  # of 32 bits, by `Mark`
MARK_STEP_NS = 32  # as fine as an H200's timer; 32 bits of them are two minutes
MAX_OWN_SCHEDULERS = 12  # warps of the block that runs schedulers, where a GPU has one for them


class Space(enum.IntEnum):
    """Where an operand lives."""

    NONE = 0
    HEAP = 1  # symmetric: same offset on every rank, reachable by peers
    LOCAL = 2  # this rank's own arena: weights, KV cache, scratch


class LaunchKind(enum.IntEnum):
    """How a task reaches its worker."""

    AHEAD = 0  # in a worker's list, known at compile time
    SINGLE = 1  # handed out by one scheduler once its events fired
    MASSIVE = 2  # its instances are shared out by all schedulers of the rank, each to its own workers
    SCHEDULER = 3  # run by scheduler 0 itself: prepares the next batch
    SPREAD = 4  # in every worker's list: each runs its share of the instances, and fires the triggers once


LISTED = (LaunchKind.AHEAD, LaunchKind.SPREAD)
"""Kinds of tasks in workers' lists; schedulers deal with the others."""


class Epilogue(enum.IntEnum):
    """What a linear or embedding task does with its result."""

    STORE = 0
    ADD = 1  # add to what is there (residual)
    SWIGLU = 2  # silu(first half) * second half
    PUSH = 3  # put the block into every rank's slot of this rank, signal with it
    ARGMAX = 4  # keep the best (value, index) of each sampled row


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class Abort(enum.IntEnum):
    NONE = 0
    HANG = 1
    RANK_LOST = 2
    INTERRUPTED = 3


class Mark(enum.IntEnum):
    """What a consumer warp of a GPU writes down of a task, in a kernel compiled for it (csrc/device/core/marks.cuh), in 32 bits:
    clocks of its SM but for the first two. Of what happens once a round of rows the last time counts.
    """

    TASK = 0  # its number in the program, from 1
    TIME = 1  # when its body is entered, by the GPU's timer, in steps of MARK_STEP_NS
    ENTERED = 2
    PREPARED = 3  # what needs no inputs is done: a tile of weights is held, keys and values are asked for
    INPUTS = 4  # are there
    FIRST = 5  # products with weights that are not held begin
    LAST = 6  # of these, or of keys and values, are done
    MET = 7  # what the other warps have found is there, for those that put it together
    STORED = 8  # by those
    LEFT = 9  # the warp goes on to the next task


ENUMS: tuple[type[enum.IntEnum], ...] = (Space, LaunchKind, Epilogue, FinishReason, Abort, Mark)
CONSTANTS = {
    "MAGIC": MAGIC,
    "SPACE_SHIFT": SPACE_SHIFT,
    "MAX_ROWS": MAX_ROWS,
    "MAX_RANKS": MAX_RANKS,
    "EVENT_STRIDE_BYTES": EVENT_STRIDE_BYTES,
    "TASK_ARGS_BYTES": TASK_ARGS_BYTES,
    "NO_EVENT": NO_EVENT,
    "M_TILE": M_TILE,
    "K_TILE": K_TILE,
    "N_TILE": N_TILE,
    "M_TILES_PER_BLOCK": M_TILES_PER_BLOCK,
    "K_TILES_PER_BLOCK": K_TILES_PER_BLOCK,
    "COMBINE_SLICE": COMBINE_SLICE,
    "PARTIAL_HEADER_FLOATS": PARTIAL_HEADER_FLOATS,
    "PARTIAL_FLOATS": PARTIAL_FLOATS,
    "MAX_FUSED_COMBINE_COLS": MAX_FUSED_COMBINE_COLS,
    "COMBINE_WIDTH": COMBINE_WIDTH,
    "POSITIONS_PER_PASS": POSITIONS_PER_PASS,
    "FUSED_PARTIAL_HEADER": FUSED_PARTIAL_HEADER,
    "MAX_OWN_SCHEDULERS": MAX_OWN_SCHEDULERS,
    "MARK_STEP_NS": MARK_STEP_NS,
    "MARKED_TASKS": MARKED_TASKS,
    "MARKED_WORKERS": MARKED_WORKERS,
    "MARK_WORDS": MARK_WORDS,
}


def operand(space: Space, offset_bytes: int) -> int:
    """Pack an address space and a byte offset into an operand."""
    return (int(space) << SPACE_SHIFT) | offset_bytes


def split_operand(value: int) -> tuple[Space, int]:
    """The address space and byte offset of an operand."""
    return Space(value >> SPACE_SHIFT), value & ((1 << SPACE_SHIFT) - 1)
