"""The batch of an iteration, and the state that the batcher keeps between iterations."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint8, c_uint16, c_uint32, c_uint64

from distmk.abi.sampling import SlotSampling
from distmk.abi.values import MAX_BUCKET_ROWS, MAX_ROWS, MAX_SEQUENCES


class BatchRow(ctypes.Structure):
    """A token row of an iteration: one token of one sequence. `sample` is a `RowSample`."""

    _fields_ = [("token", c_int32), ("position", c_int32), ("slot", c_int32), ("sample", c_int32)]


class BatchRun(ctypes.Structure):
    """Consecutive rows of one sequence. After this iteration the sequence's cache holds `kv_len` positions."""

    _fields_ = [("row_begin", c_int32), ("num_rows", c_int32), ("slot", c_int32), ("kv_len", c_int32)]


class Batch(ctypes.Structure):
    """Batch metadata of an iteration, put to every rank by rank 0's scheduler.

    num_reset_rows: the larger row count of this iteration and the one before. The writer of a Lamport vector resets that
    many rows of an older buffer of the rotation (distmk/lower/rotating.py).
    stop: 0 while the program goes on; 1 at the end of the launch; ENDS_TURN + p if program p has the next turn.
    num_job_rows, num_job_runs: counts of the `JobBatch` that begins with this batch; 0 in a slab iteration.
    """

    _fields_ = [
        ("num_rows", c_uint32),
        ("num_runs", c_uint32),
        ("stop", c_uint16),
        ("num_reset_rows", c_uint16),
        ("num_job_rows", c_uint16),
        ("num_job_runs", c_uint16),
        # The first run is next to the counts, because batch 1 reads both.
        ("runs", BatchRun * MAX_ROWS),
        ("rows", BatchRow * MAX_ROWS),
    ]


class JobBatch(ctypes.Structure):
    """Batch metadata of a job iteration: its program may carry more than MAX_ROWS rows.

    batch: the counts, without rows or runs.
    rows: the sampled rows, `batch.num_rows` of them; row i is row `sampled[i]` of the iteration.
    runs: `batch.num_job_runs` runs, which cover the rows of the iteration in order.
    tokens: one for each row of the iteration.
    """

    _fields_ = [
        ("batch", Batch),
        ("rows", BatchRow * MAX_SEQUENCES),
        ("runs", BatchRun * MAX_SEQUENCES),
        ("sampled", c_uint32 * MAX_SEQUENCES),
        ("tokens", c_int32 * MAX_BUCKET_ROWS),
    ]


class Candidate(ctypes.Structure):
    """The best logit of a row so far, and its token id."""

    _fields_ = [("value", c_float), ("token", c_int32)]


class RequestEntry(ctypes.Structure):
    """An entry of the launch's request table. The host fills it before it sends the command that adds the request.

    id: the number under which tokens are published.
    prompt_len: length of the prompt, whose ids are in the entry's row of the prompt array.
    num_output: the last so many ids of the prompt were generated before the request was preempted.
    prefix: PageRef[num_prefix_pages], pages that may hold keys and values of the prompt's first tokens, but never of all.
    pages: PageRef[1 + pages], where the batcher writes which pages the request has; 0: it writes nothing. The first
    element's `page` is the number of tokens that were found in the cache.
    reports_logprobs: 1 if each drawn token comes with a LogprobRecord.
    num_scores: the last so many tokens of the prompt, without generated ones, are published with a LogprobRecord.
    sample: RowSample.DRAW if tokens are drawn with `sampling`. Otherwise the best token is taken, and `sampling` is for
    scores only.
    sampling: its `tokens` and `prompt_len` are filled in at admission. With a `mask`, `sample` is RowSample.DRAW, and the
    sequence has no drafts.
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
    """A page of the KV cache with a certain content. `generation` is counted up when the page gets other content."""

    _fields_ = [("page", c_int32), ("generation", c_uint32)]


class KvPage(ctypes.Structure):
    """A page of the KV cache that has been in use.

    num_users: sequences that use the page.
    next, previous: while there are none, its neighbours in the list of free pages (-1: none).
    """

    _fields_ = [("next", c_int32), ("previous", c_int32), ("num_users", c_uint32), ("generation", c_uint32)]


class Command(ctypes.Structure):
    """An element of the command ring: a `CommandKind` for request `id`, which is in `entry` of the request table."""

    _fields_ = [("kind", c_uint32), ("entry", c_uint32), ("id", c_uint32), ("pad", c_uint32)]


class TokenEvent(ctypes.Structure):
    """An element of the token ring: a generated token of request `request`.

    token: negative if there is none. Either the request ended without one (`finish` says why), or the next token of its prompt
    was scored (`finish` is NONE). The tokens of a prompt are scored in order, each once.
    has_logprobs: 1 if the element at the same index in the ring of records belongs to this event.
    """

    _fields_ = [
        ("request", c_uint32),
        ("token", c_int32),
        ("finish", c_uint16),
        ("has_logprobs", c_uint16),
        ("iteration", c_uint32),
    ]


class Sequence(ctypes.Structure):
    """A running sequence, and how far it is. `request` is its entry of the request table, -1 while the slot is free."""

    _fields_ = [
        ("request", c_int32),
        ("position", c_uint32),  # tokens in the KV cache, for which it has pages
        ("prompt_len", c_uint32),
        ("last_token", c_int32),
        ("num_put_pages", c_uint32),  # pages whose entries of the page table are on all ranks
        # Twice the number of its admission, plus 1 if its request has a seed. The youngest sequence was admitted last.
        ("admission", c_uint32),
    ]


class PagePoolState(ctypes.Structure):
    """State of the page pool, beside the KvPage of each page.

    num_touched: pages that have been in use; the other pages are free.
    first_free, last_free: the ends of the list of used pages that are free again, the least recently used one first.
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
    """Rank 0's memory between iterations. On a GPU it is in shared memory, which has no byte left for more.

    In its buffer it is followed by a PagePoolState, a KvPage for each page of the KV cache, and what slots from MAX_ROWS
    on need (csrc/runtime/sequences.h).

    first_slot: the slot whose prompt the next batch continues first.
    finishing: 1 once the host has sent `FINISH`.
    pages_changed: 1 if the last batch came with new entries of the page table.
    tokens_taken: 1 once the step has taken the last iteration's tokens.
    last_rows: rows of the last slab iteration.
    end_slot: one past the last slot in use.
    num_seeded: running sequences whose request has a seed.
    num_commands: commands that were read. Commands from `num_admitted` on may be requests that wait.
    num_iterations: iterations whose batch was built, of all programs.
    tokens_read: the host's count, as last seen.
    beat_ns: time of the last beat (`Control`).
    slots: the sequences in the first MAX_ROWS slots.
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
