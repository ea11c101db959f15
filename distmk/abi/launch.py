"""Input and output of a launch: its parameters, injected faults, and records of stuck waits and of tasks."""

from __future__ import annotations

import ctypes
from ctypes import c_uint16, c_uint32, c_uint64

from distmk.abi.drafts import DraftTotals


class WaitRecordABI(ctypes.Structure):
    """What a stuck worker or scheduler waited for; valid once `filled` is 1."""

    _fields_ = [
        ("filled", c_uint32),
        ("worker", c_uint32),
        ("task", c_uint32),
        ("event", c_uint32),
        ("want", c_uint64),
        ("got", c_uint64),
        ("order", c_uint32),
        ("expired", c_uint32),  # 1: the deadline of this wait passed; 0: another waiter raised the abort flag
        ("iteration", c_uint64),
        ("program", c_uint32),  # index of the program that had the turn
        ("pad", c_uint32),
    ]


class Fault(ctypes.Structure):
    """Faults to inject.

    drop_nth: of all triggers of `drop_event` on `drop_rank` from this rank, the one with this number is dropped; 0: none.
    delay_puts_ns: on the host twin, puts to other virtual nodes (of `node_size` ranks each) take up to this long, and
    overtake each other.
    seed: decides the delays and, in the emulator, which warps fall behind and when copies land.
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
    """A task that ran, from `start_ns` (its worker was free and its waits were met) to `end_ns` (its triggers were signaled).

    finish_ns: the last part of that time, from the end of the body on. Times are of the machine's or GPU's clock, which
    differs between ranks.
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
    """The beginning of every rank's heap.

    abort: the flag that every wait polls; 0: go on, any other value is an `Abort`.
    left: the rank has released its heap in order, so that its exit is no loss of a rank.
    beat: rank 0 counts it up on every rank while it waits for the host, so that the waits of an idle launch do not expire.
    """

    _fields_ = [("abort", c_uint64), ("left", c_uint64), ("beat", c_uint64), ("pad", c_uint64 * 5)]


class HostCounts(ctypes.Structure):
    """Positions of both ends of the rings between host and batcher, each written by one side only.

    commands: commands that the host has sent.
    commands_done: commands whose elements of the ring the batcher no longer needs.
    tokens: events that the batcher has published.
    tokens_read: events that the host has read.
    iterations, num_running, num_free_pages: the batcher's state at the last step with events, for statistics.
    drafts: what became of drafts; zero if there are none.
    num_repeated_rows: rows that were not drawn, because their mask had not come (`PENDING_TOKEN`).
    """

    _fields_ = [
        ("commands", c_uint64),
        ("commands_done", c_uint64),
        ("tokens", c_uint64),
        ("tokens_read", c_uint64),
        ("iterations", c_uint64),
        ("num_running", c_uint32),
        ("num_free_pages", c_uint32),
        ("drafts", DraftTotals),
        ("num_repeated_rows", c_uint64),
    ]


class LaunchParams(ctypes.Structure):
    """The parameters of a launch. Pointers are valid in the launching process.

    The turn of another program has a copy with its own `program`, `first_iteration` and `has_first_batch`.
    """

    _fields_ = [
        ("program", c_uint64),  # the program that has the first turn
        ("programs", c_uint64),  # u64[MAX_PROGRAMS]: the address of each; 0: there is only one
        ("heap_bases", c_uint64),  # u64[num_ranks]: the address of each rank's heap in this process
        ("local_base", c_uint64),
        ("records", c_uint64),  # WaitRecordABI[num_workers + num_schedulers]
        ("requests", c_uint64),  # RequestEntry[], a table
        ("prompts", c_uint64),  # i32[requests, prompt_stride]
        ("commands", c_uint64),  # Command[command_capacity], a ring
        ("tokens", c_uint64),  # TokenEvent[token_capacity], a ring
        ("logprobs", c_uint64),  # LogprobRecord[token_capacity], beside the token ring; 0: none are reported
        ("host_counts", c_uint64),  # HostCounts*
        ("eos_ids", c_uint64),
        ("keeps_cache", c_uint16),  # 1: cached pages of the last launch are still valid
        ("has_first_batch", c_uint16),  # 1: the first iteration's batch was made in the turn before
        ("prompt_stride", c_uint32),
        ("command_capacity", c_uint32),
        ("num_eos", c_uint16),
        ("scheduler_threads", c_uint16),  # 0: schedulers ride in the workers' idle loops
        ("token_capacity", c_uint32),
        ("num_iterations", c_uint32),  # iterations of a program without an iteration event
        ("first_iteration", c_uint64),
        ("max_iterations", c_uint64),  # iterations after which the launch ends and another one continues; 0: no limit
        ("deadline_ns", c_uint64),
        ("spin_polls", c_uint32),  # polls before a wait yields its core
        ("num_remote_ranks", c_uint16),  # ranks that the transport reaches, because no pointer does
        ("network", c_uint16),  # host twin: number of the network to far ranks (csrc/host/networks.h); 0: none
        ("trace", c_uint64),  # TraceEntry[num_workers + num_schedulers][trace_capacity], rings; 0: off
        ("trace_counts", c_uint64),  # u64[num_workers + num_schedulers]: tasks that ran; the last ones have entries
        ("trace_capacity", c_uint64),
        # Fields from here on are for GPUs, except `fault` and `iterations_done`.
        ("self", c_uint64),  # Address of these parameters, where the host reads `iterations_done`
        ("faults_seen", c_uint64),  # u64*: number of triggers so far that matched the fault
        (
            "worker_owners",
            c_uint64,
        ),  # u64[CTAs], by worker index: the last launch in which a CTA took it; 0: the index is blockIdx
        ("launch_number", c_uint64),  # from 1 on
        ("fault", Fault),
        # Last, because a GPU may write it before a CTA has read the other fields.
        ("iterations_done", c_uint64),  # Output; includes the iterations before first_iteration
    ]
