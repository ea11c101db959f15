"""What a launch is given, and what it leaves: parameters, faults, records of waits and of tasks."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64


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
    """Faults to inject: the `drop_nth` trigger of `drop_event` on `drop_rank` from here is dropped (0: none). On the host
    twin puts to other virtual nodes (of `node_size` ranks each) take up to `delay_puts_ns` and overtake each other.

    `seed`: of how late they are; in the emulator, of which warps fall behind and of when copies land.
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
        ("trace", c_uint64),  # TraceEntry[num_workers + num_schedulers][trace_capacity], rings; 0: off
        ("trace_counts", c_uint64),  # u64[num_workers + num_schedulers]: tasks run; the last ones left entries
        ("trace_capacity", c_uint64),
        # The rest is for a GPU.
        ("self", c_uint64),  # where the host reads `iterations_done`
        ("faults_seen", c_uint64),  # u64*: triggers that matched the fault so far
        ("num_remote_ranks", c_uint32),  # ranks that no pointer reaches
        ("pad", c_uint32),
        ("worker_owners", c_uint64),  # u64[blocks]: the last launch in which a block took that number; 0: as they come
        ("launch_number", c_uint64),  # from 1 on
        ("fault", Fault),
        # Last, since a GPU may write it while a block has yet to read the rest.
        ("iterations_done", c_uint64),  # out; those before first_iteration included
    ]
