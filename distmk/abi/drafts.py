"""Drafts (speculative decoding): tokens that a drafter expects next, and what became of them."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_float, c_uint32, c_uint64

MAX_DRAFTS = 15  # most drafts of a sequence in an iteration: with the row before them they fill a slab iteration
MAX_SEARCHED = 1 << 14  # most positions of its history in which a drafter looks for a sequence's last tokens
ROW_COST_UNIT = 1024  # `SchedulerStepArgs.row_cost` of a row that takes as long as an iteration of one row


class DraftSource(enum.IntEnum):
    """Where `propose_drafts` finds the tokens that follow."""

    EARLIEST = 0  # behind the first of the longest matches with the sequence's last tokens
    LATEST = 1  # behind the last of these
    GIVEN = 2  # the host has put them behind the prompt


class DraftSlot(ctypes.Structure):
    """The drafts of the sequence in a slot, on rank 0.

    tokens: address or operand of its i32 ids by position: the prompt, the output, then `num_drafts` drafts.
    num_tokens: confirmed ids, of which all but the last are in the KV cache; advanced by `accept_drafts`.
    num_drafts: set by a drafter. The scheduler step lowers it to the drafts that the next iteration verifies.
    acceptance: estimated probability that a draft is accepted if those before it are.
    """

    _fields_ = [
        ("tokens", c_uint64),
        ("num_tokens", c_uint32),
        ("num_drafts", c_uint32),
        ("acceptance", c_float),
        ("reserved", c_uint32),
    ]


class DraftPace(ctypes.Structure):
    """Means over the last iterations of a program that had no rows of prompts, from which follows what one more row costs.

    begin_ns: when the present iteration's batch was made; 0: its time is not measured.
    num: iterations so far, up to the number that the means are over; fewer after a change of the sequences.
    num_sequences: in the last of them.
    rows, tokens, ns: of an iteration. rows_variance, covariance: of the rows, and of rows and ns.
    """

    _fields_ = [
        ("begin_ns", c_uint64),
        ("num", c_uint32),
        ("num_sequences", c_uint32),
        ("rows", c_float),
        ("tokens", c_float),
        ("ns", c_float),
        ("rows_variance", c_float),
        ("covariance", c_float),
        ("reserved", c_uint32),
    ]


class DraftTotals(ctypes.Structure):
    """What became of the drafts of a launch so far.

    num_drafts: how often drafts of a sequence were verified (vLLM's word). num_draft_tokens: how many drafts these were.
    num_accepted: of the drafts at each place behind the last token, how many were accepted.
    """

    _fields_ = [
        ("num_drafts", c_uint64),
        ("num_draft_tokens", c_uint64),
        ("num_accepted", c_uint64 * MAX_DRAFTS),
        ("reserved", c_uint64),
    ]
