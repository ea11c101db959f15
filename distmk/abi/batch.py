"""The batch of an iteration, and the state of the batcher between iterations."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint8, c_uint16, c_uint32, c_uint64

from distmk.abi.sampling import SlotSampling
from distmk.abi.values import MAX_BUCKET_ROWS, MAX_ROWS, MAX_SEQUENCES


class BatchRow(ctypes.Structure):
    """A token row of an iteration: one token of one sequence."""

    _fields_ = [("token", c_int32), ("position", c_int32), ("slot", c_int32), ("sample", c_int32)]


class BatchRun(ctypes.Structure):
    """Consecutive rows of one sequence; after this iteration the sequence's cache holds `kv_len` positions."""

    _fields_ = [("row_begin", c_int32), ("num_rows", c_int32), ("slot", c_int32), ("kv_len", c_int32)]


class Batch(ctypes.Structure):
    """Batch metadata of an iteration, put to every rank by rank 0's scheduler.

    num_reset_rows: the larger row count of this iteration and the one before. The writer of a Lamport vector resets as many
    rows in the buffer of its last use. stop: 0 while the program goes on; 1 at the end of the launch; ENDS_TURN + p if program
    p takes the next turn. num_job_rows, num_job_runs: of the `JobBatch` that begins with this batch; 0 in a slab iteration.
    """

    _fields_ = [
        ("num_rows", c_uint32),
        ("num_runs", c_uint32),
        ("stop", c_uint16),
        ("num_reset_rows", c_uint16),
        ("num_job_rows", c_uint16),
        ("num_job_runs", c_uint16),
        # The first run is next to the counts: batch 1 reads both, one after the other.
        ("runs", BatchRun * MAX_ROWS),
        ("rows", BatchRow * MAX_ROWS),
    ]


class JobBatch(ctypes.Structure):
    """Batch metadata of a job iteration. `batch` has its counts, and no rows or runs.

    rows: the sampled ones, `batch.num_rows`, of which row i is row `sampled[i]` of the iteration. runs: `batch.num_job_runs` of
    them cover the rows of the iteration in order. tokens: by row of the iteration.
    """

    _fields_ = [
        ("batch", Batch),
        ("rows", BatchRow * MAX_SEQUENCES),
        ("runs", BatchRun * MAX_SEQUENCES),
        ("sampled", c_uint32 * MAX_SEQUENCES),
        ("tokens", c_int32 * MAX_BUCKET_ROWS),
    ]


class Candidate(ctypes.Structure):
    """The best logit of a row so far and its token id."""

    _fields_ = [("value", c_float), ("token", c_int32)]


class Request(ctypes.Structure):
    """An entry of the launch's request table, which the host fills before it sends the command that adds the request.

    id: the number under which tokens are published. The prompt is `prompt_len` ids in the entry's row of the prompt array.
    num_output: of these, the last ones that were generated, before the request was put back. prefix: PageRef[num_prefix_pages],
    pages that may hold the keys and values of the prompt's first tokens, not of all. pages: PageRef[1 + pages], where the batcher
    tells the host which pages the request has; the first element's `page` is the number of cached tokens that it found; 0: it
    tells nothing.
    reports_logprobs: 1 if each drawn token comes with a LogprobRecord. num_scores: the last tokens of the prompt, those generated
    left out, that are published with one.
    sample: RowSample.DRAW if tokens are drawn with `sampling`; else the best is taken, and `sampling` is for scores only. At
    admission its `tokens` and `prompt_len` are filled in.
    """

    _fields_ = [
        ("id", c_uint32),
        ("prompt_len", c_uint32),
        ("max_new", c_uint32),
        ("ignore_eos", c_uint16),
        ("reports_logprobs", c_uint16),
        ("num_output", c_uint32),
        ("num_prefix_pages", c_uint32),
        ("prefix", c_uint64),
        ("pages", c_uint64),
        ("sample", c_uint32),
        ("num_scores", c_uint32),
        ("sampling", SlotSampling),
    ]


class PageRef(ctypes.Structure):
    """The content that a page of the KV cache has in its `generation`: that is counted up when the page gets another content."""

    _fields_ = [("page", c_int32), ("generation", c_uint32)]


class KvPage(ctypes.Structure):
    """A page of the KV cache that was in use at some time: the sequences that use it, and while there are none its neighbours in
    the list of free pages (-1: none).
    """

    _fields_ = [("next", c_int32), ("previous", c_int32), ("num_users", c_uint32), ("generation", c_uint32)]


class Command(ctypes.Structure):
    """An element of the command ring: a `CommandKind` for request `id` in `entry` of the request table."""

    _fields_ = [("kind", c_uint32), ("entry", c_uint32), ("id", c_uint32), ("pad", c_uint32)]


class TokenEvent(ctypes.Structure):
    """An element of the token ring: a generated token of request `request`, or -1 if it was cancelled or put back (`finish`
    says so), or if the next token of its prompt was scored (`finish` is NONE). Prompts are scored in order, each token once.

    has_logprobs: 1 if the element of the ring of records at the same index belongs to it.
    """

    _fields_ = [
        ("request", c_uint32),
        ("token", c_int32),
        ("finish", c_uint16),
        ("has_logprobs", c_uint16),
        ("iteration", c_uint32),
    ]


class Sequence(ctypes.Structure):
    """A running sequence: the entry of the request it serves and how far it is. `request` is -1 while the slot is free."""

    _fields_ = [
        ("request", c_int32),
        ("position", c_uint32),  # tokens already in the KV cache, for which it has pages
        ("prompt_len", c_uint32),
        ("last_token", c_int32),
        ("num_put_pages", c_uint32),  # of which all ranks have the page table's entries
        # Twice the number of its admission, of which the youngest sequence has the last one; plus 1 if its request has a seed.
        ("admission", c_uint32),
    ]


class PagePoolState(ctypes.Structure):
    """What belongs to the KvPage of all pages. num_touched: that were in use at some time; the others are free. first_free,
    last_free: of the list of those that are free again, the least recently used one first.

    awaited_pages: free pages that the request of command `awaited_command` waits for.
    """

    _fields_ = [
        ("num_touched", c_uint32),
        ("first_free", c_int32),
        ("last_free", c_int32),
        ("awaited_pages", c_uint32),
        ("awaited_command", c_uint64),
        ("reserved", c_uint64),
    ]


class BatcherState(ctypes.Structure):
    """Rank 0's memory between iterations. In its buffer a PagePoolState, a KvPage for each page of the KV cache, and what slots
    from MAX_ROWS on need follow it (csrc/runtime/sequences.h). On a GPU it is in shared memory, of which nothing is left.

    slots: the first MAX_ROWS. end_slot: behind the last slot in use.
    num_iterations: of all programs, those whose batch was built. last_rows: of the last one of slabs. tokens_taken: 1 once the
    step has taken the last iteration's tokens. num_admissions: so far. finishing: the host has sent `FINISH`. pages_changed: the
    last batch came with new entries of the page table. num_seeded: running sequences whose request has a seed.
    num_commands: read of the command ring; those from `num_admitted` on may
    be requests that wait. tokens_read: as last seen. beat_ns: time of the last beat (`Control`).
    """

    _fields_ = [
        ("num_free_pages", c_uint32),
        ("num_admissions", c_uint32),
        ("num_running", c_uint8),
        ("first_slot", c_uint8),
        ("finishing", c_uint8),
        ("pages_changed", c_uint8),
        ("tokens_taken", c_uint8),
        ("last_rows", c_uint8),
        ("end_slot", c_uint8),
        ("num_seeded", c_uint8),
        ("num_commands", c_uint64),
        ("num_admitted", c_uint64),
        ("num_published", c_uint64),
        ("num_iterations", c_uint64),
        ("tokens_read", c_uint64),
        ("beat_ns", c_uint64),
        ("slots", Sequence * MAX_ROWS),
    ]
