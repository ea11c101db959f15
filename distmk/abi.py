"""The one source of every layout that Python shares with csrc.

`scripts/gen_abi.py` writes `csrc/abi.h` from the structs and enums here and from the argument structs that task types
register (distmk/tasks). All fields are naturally aligned little-endian; `ABI_HASH` is compared at launch.

An *operand* is 64 bits: an address space in the top byte and a byte offset below it, so that one program serves every
rank and both backends.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_int32, c_uint8, c_uint16, c_uint32, c_uint64

MAGIC = 0x31304B4D54534944  # "DISTMK01"
SPACE_SHIFT = 56
MAX_ROWS = 16  # token rows an iteration can carry
MAX_RANKS = 64
EVENT_STRIDE_BYTES = 64  # one event a cache line: counters on one line would make waiters slow each other down
TASK_ARGS_BYTES = 160
NO_EVENT = 0xFFFFFFFF
# How a GPU streams weights (distmk/tiles.py, csrc/device/ring.cuh).
TILE_ROWS = 16
TILE_K = 256  # columns of a tile: 8 KB, the least that a bulk copy must have to be fast
ROUND_GROUPS = 3  # groups of TILE_ROWS rows whose sums are kept at once
BLOCK_TILES = 4  # tiles of a row that share one load of activations
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


class Wait(ctypes.Structure):
    """Satisfied in iteration i once the event counted `count * (i + 1 - lag)`. `system`: peers signal the event too."""

    _fields_ = [("event", c_uint32), ("count", c_uint32), ("lag", c_uint32), ("system", c_uint32)]


class Trigger(ctypes.Structure):
    """Adds `amount` to `event` on `rank` when the task is done. `system`: some of the event's tasks are on another rank."""

    _fields_ = [("event", c_uint32), ("rank", c_uint32), ("amount", c_uint32), ("system", c_uint32)]


class TaskDesc(ctypes.Structure):
    """One task. `order` is its place in the program's sequential order, over all ranks.

    A spread task has one descriptor, the same bytes, in every worker's list; instance 0 is `first_worker`'s, instance 1
    the next worker's, and so on round the workers.
    """

    _fields_ = [
        ("type", c_uint16),
        ("launch", c_uint16),
        ("num_waits", c_uint16),
        ("num_triggers", c_uint16),
        ("wait_begin", c_uint32),
        ("trigger_begin", c_uint32),
        ("order", c_uint32),
        ("max_instances", c_uint32),
        ("first_worker", c_uint32),
        ("reserved", c_uint32),
        ("args", c_uint8 * TASK_ARGS_BYTES),
    ]


class Queue(ctypes.Structure):
    """A worker's ahead-of-time tasks: `count` descriptors from `begin`, in the order they run."""

    _fields_ = [("begin", c_uint32), ("count", c_uint32)]


class JitEntry(ctypes.Structure):
    """A slot of a just-in-time ring: which task, for which iteration, and which of its instances."""

    _fields_ = [("task", c_uint32), ("iteration", c_uint32), ("instance", c_uint32), ("reserved", c_uint32)]


class JitRing(ctypes.Structure):
    """Head of a single-producer, single-consumer ring, and on another cache line what its producer writes.

    Nothing more will be pushed for iterations below `closed`.
    """

    _fields_ = [
        ("head", c_uint64),
        ("pad0", c_uint64 * 7),
        ("tail", c_uint64),
        ("closed", c_uint64),
        ("pad1", c_uint64 * 6),
    ]


class BatchRow(ctypes.Structure):
    """A token row of an iteration: one token of one sequence."""

    _fields_ = [("token", c_int32), ("position", c_int32), ("slot", c_int32), ("sample", c_int32)]


class BatchRun(ctypes.Structure):
    """Consecutive rows of one sequence; after this iteration the sequence's cache holds `kv_len` positions."""

    _fields_ = [("row_begin", c_int32), ("num_rows", c_int32), ("slot", c_int32), ("kv_len", c_int32)]


class Batch(ctypes.Structure):
    """The row table of an iteration, put to every rank by rank 0's scheduler."""

    _fields_ = [
        ("num_rows", c_uint32),
        ("num_runs", c_uint32),
        ("stop", c_uint32),
        ("num_samples", c_uint32),
        ("rows", BatchRow * MAX_ROWS),
        ("runs", BatchRun * MAX_ROWS),
    ]


class Candidate(ctypes.Structure):
    """The best logit of a row so far and its token id."""

    _fields_ = [("value", c_float), ("token", c_int32)]


class Request(ctypes.Structure):
    """One prompt of a generate call: `prompt_len` ids from `prompt_begin` in the launch's prompt array."""

    _fields_ = [("prompt_begin", c_uint32), ("prompt_len", c_uint32), ("max_new", c_uint32), ("ignore_eos", c_uint32)]


class TokenEvent(ctypes.Structure):
    """An entry of the ring the host reads: a generated token of a request."""

    _fields_ = [("request", c_uint32), ("token", c_int32), ("finish", c_uint32), ("iteration", c_uint32)]


class Sequence(ctypes.Structure):
    """A running sequence: the request it serves and how far it is. `request` is -1 while the slot is free."""

    _fields_ = [
        ("request", c_int32),
        ("position", c_uint32),  # tokens already in the KV cache
        ("num_generated", c_uint32),
        ("last_token", c_int32),
        ("num_pages", c_uint32),
        ("reserved", c_uint32),
    ]


class BatcherState(ctypes.Structure):
    """Rank 0's memory between iterations; the free-page stack follows it."""

    _fields_ = [
        ("next_request", c_uint32),
        ("num_running", c_uint32),
        ("num_free_pages", c_uint32),
        ("first_slot", c_uint32),
        ("num_published", c_uint64),
        ("slots", Sequence * MAX_ROWS),
    ]


class WaitRecordABI(ctypes.Structure):
    """What a stuck worker or scheduler was waiting for; valid once `filled` is 1."""

    _fields_ = [
        ("filled", c_uint32),
        ("worker", c_uint32),
        ("task", c_uint32),
        ("event", c_uint32),
        ("want", c_uint64),
        ("got", c_uint64),
        ("order", c_uint32),
        ("expired", c_uint32),  # 1: this waiter's own deadline passed; 0: it was told to leave
        ("iteration", c_uint64),
    ]


class Fault(ctypes.Structure):
    """Faults to inject (host twin only): the `nth` trigger of `event` on `rank` from here is dropped (0: none); puts to
    other virtual nodes (of `node_size` ranks each) take up to `delay_puts_ns` and overtake each other.
    """

    _fields_ = [
        ("drop_nth", c_uint64),
        ("drop_event", c_uint32),
        ("drop_rank", c_uint32),
        ("delay_puts_ns", c_uint64),
        ("node_size", c_uint32),
        ("seed", c_uint32),
    ]


class TraceEntry(ctypes.Structure):
    """A task that ran: from when its worker turned to it, its waits met, until its triggers were fired.

    `finish_ns` is the last part of that: from the end of its body on. Times are of the clock of the machine or GPU,
    which ranks need not share.
    """

    _fields_ = [
        ("task", c_uint32),
        ("iteration", c_uint32),
        ("instance", c_uint32),
        ("finish_ns", c_uint32),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
    ]


class Control(ctypes.Structure):
    """Start of every rank's heap: the abort flag that every wait polls (0: go on; else an `Abort`).

    `left`: the rank gave its heap up in order, so that its going is not what others died of.
    """

    _fields_ = [("abort", c_uint64), ("left", c_uint64), ("pad", c_uint64 * 6)]


class Abort(enum.IntEnum):
    NONE = 0
    HANG = 1
    RANK_LOST = 2
    INTERRUPTED = 3


class ProgramHeader(ctypes.Structure):
    """First bytes of a rank's program; `*_offset` count from here, heap offsets say so."""

    _fields_ = [
        ("magic", c_uint64),
        ("abi_hash", c_uint64),
        ("rank", c_uint32),
        ("num_ranks", c_uint32),
        ("num_workers", c_uint32),
        ("num_schedulers", c_uint32),
        ("num_tasks", c_uint32),
        ("num_events", c_uint32),
        ("num_waits", c_uint32),
        ("num_triggers", c_uint32),
        ("num_launches", c_uint32),
        ("jit_capacity", c_uint32),  # entries of a worker's ring, a power of two
        ("gate_event", c_uint32),  # every iteration starts with it; NO_EVENT: a fixed number of iterations
        ("reserved", c_uint32),
        ("gate_batch", c_uint64),  # operand of the Batch whose `stop` ends the launch
        ("tasks_offset", c_uint64),
        ("waits_offset", c_uint64),
        ("triggers_offset", c_uint64),
        ("queues_offset", c_uint64),
        ("launches_offset", c_uint64),
        ("events_heap_offset", c_uint64),
        ("rings_heap_offset", c_uint64),
        ("heap_bytes", c_uint64),
        ("local_bytes", c_uint64),
        ("program_bytes", c_uint64),
        ("pad", c_uint64),  # what follows is read 16 bytes at a time
    ]


class LaunchParams(ctypes.Structure):
    """What a launch adds to a program. Pointers are of the process that launches."""

    _fields_ = [
        ("program", c_uint64),
        ("heap_bases", c_uint64),  # u64[num_ranks]: where each rank's heap is mapped here
        ("local_base", c_uint64),
        ("records", c_uint64),  # WaitRecordABI[num_workers + num_schedulers]
        ("requests", c_uint64),
        ("prompts", c_uint64),
        ("tokens", c_uint64),  # TokenEvent[token_capacity]
        ("token_count", c_uint64),  # u64*: entries published so far
        ("eos_ids", c_uint64),
        ("num_requests", c_uint32),
        ("num_eos", c_uint32),
        ("token_capacity", c_uint32),
        ("num_iterations", c_uint32),  # used where the program has no gate
        ("first_iteration", c_uint64),
        ("max_iterations", c_uint64),  # after which this launch ends and another goes on; 0: all in one
        ("deadline_ns", c_uint64),
        ("scheduler_threads", c_uint32),  # 0: schedulers ride in the workers' idle loops
        ("spin_polls", c_uint32),  # polls before a waiter gives its core away
        ("iterations_done", c_uint64),  # out; those before first_iteration included
        ("trace", c_uint64),  # TraceEntry[num_workers + num_schedulers][trace_capacity], rings; 0: off
        ("trace_counts", c_uint64),  # u64[num_workers + num_schedulers]: tasks run; the last ones left entries
        ("trace_capacity", c_uint64),
        # The rest is for a GPU.
        ("self", c_uint64),  # where the host reads `iterations_done`
        ("faults_seen", c_uint64),  # u64*: triggers that matched the fault so far
        ("num_far", c_uint32),  # ranks that no pointer reaches
        ("pad", c_uint32),
        ("fault", Fault),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Wait,
    Trigger,
    TaskDesc,
    Queue,
    JitEntry,
    JitRing,
    BatchRow,
    BatchRun,
    Batch,
    Candidate,
    Request,
    TokenEvent,
    Sequence,
    BatcherState,
    WaitRecordABI,
    Fault,
    TraceEntry,
    Control,
    ProgramHeader,
    LaunchParams,
)
ENUMS: tuple[type[enum.IntEnum], ...] = (Space, LaunchKind, Epilogue, FinishReason, Abort)
CONSTANTS = {
    "MAGIC": MAGIC,
    "SPACE_SHIFT": SPACE_SHIFT,
    "MAX_ROWS": MAX_ROWS,
    "MAX_RANKS": MAX_RANKS,
    "EVENT_STRIDE_BYTES": EVENT_STRIDE_BYTES,
    "TASK_ARGS_BYTES": TASK_ARGS_BYTES,
    "NO_EVENT": NO_EVENT,
    "TILE_ROWS": TILE_ROWS,
    "TILE_K": TILE_K,
    "ROUND_GROUPS": ROUND_GROUPS,
    "BLOCK_TILES": BLOCK_TILES,
    "MAX_OWN_SCHEDULERS": MAX_OWN_SCHEDULERS,
}


def operand(space: Space, offset_bytes: int) -> int:
    """Pack an address space and a byte offset into an operand."""
    return (int(space) << SPACE_SHIFT) | offset_bytes


def split_operand(value: int) -> tuple[Space, int]:
    """The address space and byte offset of an operand."""
    return Space(value >> SPACE_SHIFT), value & ((1 << SPACE_SHIFT) - 1)
