"""The batch of an iteration, and the state of the batcher between iterations."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint32, c_uint64

from distmk.abi.values import MAX_ROWS


class BatchRow(ctypes.Structure):
    """A token row of an iteration: one token of one sequence."""

    _fields_ = [("token", c_int32), ("position", c_int32), ("slot", c_int32), ("sample", c_int32)]


class BatchRun(ctypes.Structure):
    """Consecutive rows of one sequence; after this iteration the sequence's cache holds `kv_len` positions."""

    _fields_ = [("row_begin", c_int32), ("num_rows", c_int32), ("slot", c_int32), ("kv_len", c_int32)]


class Batch(ctypes.Structure):
    """Batch metadata of an iteration, put to every rank by rank 0's scheduler.

    num_reset_rows: the larger row count of this iteration and the one before. The writer of a Lamport vector resets as many
    rows in the buffer of its last use.
    """

    _fields_ = [
        ("num_rows", c_uint32),
        ("num_runs", c_uint32),
        ("stop", c_uint32),
        ("num_reset_rows", c_uint32),
        # The first run is next to the counts: batch 1 reads both, one after the other.
        ("runs", BatchRun * MAX_ROWS),
        ("rows", BatchRow * MAX_ROWS),
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
