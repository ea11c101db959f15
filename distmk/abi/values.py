"""Constants, enumerations and operands that Python shares with csrc."""

from __future__ import annotations

import enum

from distmk.abi.drafts import MAX_DRAFTS, MAX_SEARCHED, ROW_COST_UNIT, DraftSource
from distmk.abi.sampling import (
    COUNT_IN_PROMPT,
    MAX_BANNED,
    MAX_BIASES,
    MAX_LOGPROBS,
    NO_TOKEN_ALLOWED,
    PENDING_TOKEN,
    TOKENS_PER_SEGMENT,
    RowSample,
    SamplingFlag,
)

MAGIC = 0x31304B4D54534944  # "DISTMK01"
SPACE_SHIFT = 56
MAX_ROWS = 16  # most token rows of a slab iteration; most sequences at once if there is only a slab program
MAX_SEQUENCES = 128  # most sequences that run at once; most sampled rows of a job iteration
EVENTS_PER_ROW = 3  # most events that a step publishes for a row: token or score, cancelled, preempted
MAX_PROGRAMS = 6  # most programs of a launch
ENDS_TURN = 2  # Batch.stop is ENDS_TURN + p if program p has the next turn
MAX_BUCKET_ROWS = 512  # most token rows of a job iteration
ACTIVATION_BLOCK_COLS = 64  # columns of a block of a job iteration's activations: 128 bytes of a row
MAX_K_SPLITS = 2  # most parts into which different jobs divide the columns of a row-parallel product
MAX_RANKS = 64
EVENT_STRIDE_BYTES = 64  # one event per cache line: otherwise polls of neighbouring counters would slow each other down
TASK_ARGS_BYTES = 160
NO_EVENT = 0xFFFFFFFF
# How a GPU streams weights (distmk/formats/tiles.py, csrc/device/core/pipeline.cuh).
M_TILE = 16
K_TILE = 256  # columns of a weight tile: 8 KB, the smallest bulk copy that reaches full bandwidth
N_TILE = 8  # tokens of a tensor-core product; a body that polls writes up to so many rows before its waits are met
M_TILES_PER_BLOCK = 4  # M tiles whose accumulators are in registers together
K_TILES_PER_BLOCK = 8  # K tiles of a block: one per consumer warp, which loads the activations for it
COMBINE_SLICE = 32  # elements of a head that a warp combines together
PARTIAL_HEADER_FLOATS = 4  # floats before a partial's elements of a slice: maximum, sum, two unused
PARTIAL_FLOATS = PARTIAL_HEADER_FLOATS + COMBINE_SLICE
MAX_FUSED_COMBINE_COLS = 4096  # columns of attention's output that a consumer GEMV can combine for itself
COMBINE_WIDTH = 8  # splits that are combined together
FUSED_PARTIAL_HEADER = 8  # bf16 elements before a partial of the fused combine: log-sum-exp as float32, the rest unused
POSITIONS_PER_PASS = 128  # KV positions of an attention instance that the warps of a CTA hold in registers together
HOT_HEAD_DIM = 128  # most elements of a head for attention in the loop of a GPU's consumers
MAX_HEAD_DIM = 256  # most elements of a head on a GPU
ROW_JOB_QUERIES = 16  # queries of a row job of attention at most; its heads have up to MAX_HEAD_DIM / 2 elements
ROW_PARTIAL_FLOATS = ROW_JOB_QUERIES * (2 + MAX_HEAD_DIM // 2)  # a query's maximum, sum and accumulator
ROW_SHARE_FLOATS = 2 * ROW_PARTIAL_FLOATS + 4  # partials of a worker's first and last row job, and a counter
MARKED_TASKS = 64  # the last tasks of a worker, for which its warps record marks
MARKED_WORKERS = 256
MARK_WORDS = 16  # 32-bit words of a task's marks, indexed by `Mark`
MARK_STEP_NS = 32  # the resolution of an H200's timer; 32 bits of steps are two minutes
MAX_OWN_SCHEDULERS = 12  # most warps in the CTA that runs the schedulers, if they have an SM of their own


class Space(enum.IntEnum):
    """The address space of an operand."""

    NONE = 0
    HEAP = 1  # symmetric: same offset on every rank, reachable by peers
    LOCAL = 2  # this rank's own arena: weights, KV cache, scratch


class LaunchKind(enum.IntEnum):
    """How a task reaches the worker or scheduler that runs it."""

    AHEAD = 0  # in the list of one worker, known at compile time
    SINGLE = 1  # dispatched by one scheduler once its waits are met
    MASSIVE = 2  # all schedulers of the rank dispatch its instances, each to its own workers
    SCHEDULER = 3  # run by scheduler 0 itself: prepares the next batch
    SPREAD = 4  # in the list of every worker: each runs its part of the instances and signals once


LISTED = (LaunchKind.AHEAD, LaunchKind.SPREAD)
"""Launch kinds of tasks in workers' lists. Schedulers dispatch or run all other tasks."""


class ActivationLayout(enum.IntEnum):
    """The layout of a job iteration's activations (`distmk.tasks.activations`)."""

    ROWS = 0
    TILES = 1  # blocks of columns, as a tensor-core operand
    LANE_TILES = 2  # the same with columns in the order of lanes, for packed weights


class Epilogue(enum.IntEnum):
    """What a linear or embedding task does with its result."""

    STORE = 0  # float32 rows; bf16 rows in a product of a job program
    ADD = 1  # add to the output's content (residual)
    SWIGLU = 2  # silu(first half) * second half
    PUSH = 3  # put the block into this rank's slot on every rank, and signal with it
    ARGMAX = 4  # keep the best (value, index) of each sampled row
    GEGLU = 5  # gelu(first half) * second half, gelu in its tanh approximation
    PARTS = 6  # float32, into this rank's slots on the ranks that own the rows
    LOGITS = 7  # float32 rows


GATED = (Epilogue.SWIGLU, Epilogue.GEGLU)
"""Epilogues of gate and up: activation(first half) * second half. The output has half as many columns as the weight has
rows."""


class FinishReason(enum.IntEnum):
    """Why a request ended: at a stop token, at its maximum length, or because the host cancelled it.

    PREEMPTED: it lacked KV pages, and the host sends it again.
    ERROR: it could get no token (`NO_TOKEN_ALLOWED`).
    """

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    PREEMPTED = 4
    ERROR = 5


class CommandKind(enum.IntEnum):
    """What a command asks of the batcher: serve a request, cancel one, or end the launch once all are served."""

    ADD = 0
    CANCEL = 1
    FINISH = 2


class Abort(enum.IntEnum):
    """Why a launch was given up: the values of the abort flag."""

    NONE = 0
    HANG = 1
    RANK_LOST = 2
    INTERRUPTED = 3


class Mark(enum.IntEnum):
    """Words that a consumer warp records per task, in a kernel compiled with -DDISTMK_MARKS (csrc/device/core/marks.cuh).

    All but the first two are 32-bit clocks of the warp's SM. An event that occurs once per M block keeps its last time.
    """

    TASK = 0  # index of the task in the program, plus 1
    TIME = 1  # entry of the body by the GPU's global timer, in steps of MARK_STEP_NS
    ENTERED = 2
    PREPARED = 3  # work without inputs is done: a weight tile is prefetched, loads of cached keys and values are issued
    INPUTS = 4  # the inputs are there
    FIRST = 5  # the mainloop begins
    LAST = 6  # the mainloop, or the KV loop of attention, is done
    MET = 7  # the partial sums of all warps are there, for the warps that reduce them
    STORED = 8  # these warps have stored the result
    LEFT = 9  # the warp leaves the task


ENUMS: tuple[type[enum.IntEnum], ...] = (
    Space,
    LaunchKind,
    ActivationLayout,
    Epilogue,
    FinishReason,
    CommandKind,
    Abort,
    Mark,
    RowSample,
    SamplingFlag,
    DraftSource,
)
CONSTANTS = {
    "MAGIC": MAGIC,
    "SPACE_SHIFT": SPACE_SHIFT,
    "MAX_ROWS": MAX_ROWS,
    "MAX_SEQUENCES": MAX_SEQUENCES,
    "EVENTS_PER_ROW": EVENTS_PER_ROW,
    "MAX_PROGRAMS": MAX_PROGRAMS,
    "ENDS_TURN": ENDS_TURN,
    "MAX_BUCKET_ROWS": MAX_BUCKET_ROWS,
    "MAX_DRAFTS": MAX_DRAFTS,
    "MAX_SEARCHED": MAX_SEARCHED,
    "ROW_COST_UNIT": ROW_COST_UNIT,
    "ACTIVATION_BLOCK_COLS": ACTIVATION_BLOCK_COLS,
    "MAX_K_SPLITS": MAX_K_SPLITS,
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
    "ROW_JOB_QUERIES": ROW_JOB_QUERIES,
    "ROW_PARTIAL_FLOATS": ROW_PARTIAL_FLOATS,
    "ROW_SHARE_FLOATS": ROW_SHARE_FLOATS,
    "HOT_HEAD_DIM": HOT_HEAD_DIM,
    "MAX_HEAD_DIM": MAX_HEAD_DIM,
    "MAX_OWN_SCHEDULERS": MAX_OWN_SCHEDULERS,
    "MAX_LOGPROBS": MAX_LOGPROBS,
    "MAX_BIASES": MAX_BIASES,
    "MAX_BANNED": MAX_BANNED,
    "TOKENS_PER_SEGMENT": TOKENS_PER_SEGMENT,
    "COUNT_IN_PROMPT": COUNT_IN_PROMPT,
    "PENDING_TOKEN": PENDING_TOKEN,
    "NO_TOKEN_ALLOWED": NO_TOKEN_ALLOWED,
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
