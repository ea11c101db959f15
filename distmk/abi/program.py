"""The parts of a rank's program: tasks with their waits and triggers, queues, just-in-time rings, and the header."""

from __future__ import annotations

import ctypes
from ctypes import c_uint8, c_uint16, c_uint32, c_uint64

from distmk.abi.values import TASK_ARGS_BYTES


class Wait(ctypes.Structure):
    """Met in iteration i once the event has reached `count * (i + 1 - lag)`. system: 1 if a producer of the event is on
    another rank.
    """

    _fields_ = [("event", c_uint32), ("count", c_uint32), ("lag", c_uint32), ("system", c_uint32)]


class Trigger(ctypes.Structure):
    """Adds `amount` to `event` on `rank` when the task is done. system: 1 if a producer of the event is on
    another rank than the event.
    """

    _fields_ = [("event", c_uint32), ("rank", c_uint32), ("amount", c_uint32), ("system", c_uint32)]


class TaskDesc(ctypes.Structure):
    """A task. order: its index in the sequential order of the program, over all ranks.

    A spread task has the same descriptor in the list of every worker. Instance 0 belongs to `first_worker`, instance 1 to
    the next worker, and so on, round robin.
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
        (
            "deep_lookahead",
            c_uint32,
        ),  # 1: may begin before the waits of the last two tasks in its queue are met
        ("args", c_uint8 * TASK_ARGS_BYTES),
    ]


class InputNormArgs(ctypes.Structure):
    """What a task that writes columns of the residual stream adds for the next norm (distmk/tasks/input_norm.py)."""

    _fields_ = [
        ("weight", c_uint64),  # f32, weights of the norm for the task's columns: factors of out_bf16; 0: no such norm
        ("squares", c_uint64),  # f32, one for each row: sum of the squares of the columns before that
        ("squares_stride", c_uint32),  # in elements
        ("pad", c_uint32),
    ]


class Queue(ctypes.Structure):
    """A worker's ahead-of-time tasks: `count` descriptors from `begin`, in the order they run."""

    _fields_ = [("begin", c_uint32), ("count", c_uint32)]


class JitEntry(ctypes.Structure):
    """An entry of a just-in-time ring: the task's index, the iteration and the instance."""

    _fields_ = [("task", c_uint32), ("iteration", c_uint32), ("instance", c_uint32), ("reserved", c_uint32)]


class JitRing(ctypes.Structure):
    """A single-producer, single-consumer ring: the consumer's counter and, on another cache line, the producer's.

    closed: nothing more will be pushed for iterations before this one.
    """

    _fields_ = [
        ("head", c_uint64),
        ("pad0", c_uint64 * 7),
        ("tail", c_uint64),
        ("closed", c_uint64),
        ("pad1", c_uint64 * 6),
    ]


class ProgramHeader(ctypes.Structure):
    """The beginning of a rank's program. `*_heap_offset` are offsets in the heap; all other offsets count from here."""

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
        (
            "iteration_event",
            c_uint32,
        ),  # starts each iteration; NO_EVENT: a fixed number of iterations
        ("host", c_uint16),  # number of this rank's host, from 0; the ranks of a host are consecutive
        ("index", c_uint16),  # number of the program in a launch of several
        ("iteration_batch", c_uint64),  # operand of the Batch whose `stop` ends the launch
        ("tasks_offset", c_uint64),
        ("waits_offset", c_uint64),
        ("triggers_offset", c_uint64),
        ("queues_offset", c_uint64),
        ("launches_offset", c_uint64),
        ("events_heap_offset", c_uint64),
        ("rings_heap_offset", c_uint64),
        ("zeroed_heap_bytes", c_uint64),  # bytes at the beginning of the heap that are zeroed before a launch
        ("heap_bytes", c_uint64),
        ("local_bytes", c_uint64),
        ("program_bytes", c_uint64),  # size of header and tables, which are read in 16-byte words
    ]
