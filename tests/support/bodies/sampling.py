"""Cases of the sampling tasks. The distribution of draws is tested in tasks/test_sample_row.py."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch
from support.bodies.board import Board, f32
from support.sampling_board import CANDIDATE, RECORD, make_slot, pack_mask
from support.sampling_cases import VOCAB, Case, distribution, make_cases

from distmk.abi import (
    COUNT_IN_PROMPT,
    MAX_BUCKET_ROWS,
    MAX_ROWS,
    MAX_SEQUENCES,
    NO_TOKEN_ALLOWED,
    PENDING_TOKEN,
    Batch,
    BatchRow,
    Bias,
    JobBatch,
    RowSample,
    SlotSampling,
    Space,
)
from distmk.graph.regions import Region
from distmk.model.shards import partition
from distmk.tasks import CountTokens, SampleRow, SendLogits
from distmk.tasks.sampling import DRAWN_BYTES, RECORD_BYTES, mask_vector_words, section_stride
from distmk.testing.arrays import assert_close
from distmk.testing.memory import Memory

POSITION, NUM_BEST = 40, 7
TABLES_BYTES = 12288  # whole pages, so that an access that is not declared is seen
NUM_COUNTED = 3


def _most(is_job_batch: bool) -> int:
    """Slots, and sampled rows of an iteration."""
    return MAX_SEQUENCES if is_job_batch else MAX_ROWS


def _batch(board: Board, rank: int, rows: dict[int, BatchRow], is_job_batch: bool) -> Region:
    """A batch with these rows, of which others are not sampled."""
    num_rows = max(rows) + 1
    if is_job_batch:
        batch = JobBatch(Batch(num_rows=num_rows, num_job_rows=MAX_BUCKET_ROWS))
    else:
        batch = Batch(num_rows=num_rows, num_runs=num_rows)
    for index, row in rows.items():
        batch.rows[index] = row
    return board.filled(rank, batch, "u8", space=Space.HEAP)


def _tables(board: Board, rank: int, content: bytes) -> Region:
    """A buffer with the content in its middle."""
    raw = np.zeros(TABLES_BYTES, np.uint8)
    raw[TABLES_BYTES // 2 :][: len(content)] = np.frombuffer(content, np.uint8)
    return board.filled(rank, raw, "u8")


def _slots(
    board: Board, rank: int, index: int, slot: SlotSampling, field: str, tables: Region, is_job_batch: bool
) -> Region:
    """Parameters of all slots; `field` of slot `index` will point to the content of `tables`."""
    slots = (SlotSampling * _most(is_job_batch))()
    slots[index] = slot
    region = board.filled(rank, np.frombuffer(slots, np.uint8).copy(), "u8")
    begin = index * ctypes.sizeof(SlotSampling) + getattr(SlotSampling, field).offset
    board.pointers.append((region, begin, tables, TABLES_BYTES // 2))
    return region


def send_logits(board: Board, rank: int, is_job_batch: bool) -> None:
    """Columns of the rows that need their logits, and of no others, to rank 0."""
    num_cols, rows = int(board.rng.integers(1, 200)), 21 if is_job_batch else 6
    batch = {row: BatchRow(0, 1, row, row % 4) for row in range(rows)}
    sent = [row for row in range(rows) if row % 4 >= RowSample.DRAW]
    logits = board.buffer(num_cols + 8, _most(is_job_batch), space=Space.HEAP)
    region, data = logits.at(rank, 3, 3 + num_cols), torch.randn(_most(is_job_batch), num_cols)
    board.fill(region, data)
    for row in sent:
        board.writable(region.on(0), first_row=row)
    board.graph.add(
        SendLogits(
            rank,
            "send_logits",
            logits=region,
            batch=_batch(board, rank, batch, is_job_batch),
            is_job_batch=is_job_batch,
        )
    )

    def check(memory: Memory) -> None:
        assert_close("", f32(memory, region.on(0), rows)[sent], data[sent], 0)

    board.expect(0, "sample", f"send_logits of {num_cols} is_job_batch={is_job_batch}", check, of=rank)


def count_tokens(board: Board, rank: int, is_job_batch: bool) -> None:
    """The tokens since the last draw are counted; those of other slots stay."""
    row, index = int(board.rng.integers(_most(is_job_batch))), int(board.rng.integers(_most(is_job_batch)))
    ids = board.rng.integers(0, VOCAB, POSITION + 1).astype(np.int32)
    tables = _tables(board, rank, ids.tobytes())
    slot = make_slot(Case("", torch.zeros(VOCAB), in_prompt=frozenset({0})), 0)
    slot.prompt_len, slot.num_counted = POSITION // 2, NUM_COUNTED
    slots = _slots(board, rank, index, slot, "tokens", tables, is_job_batch)
    old = board.rng.integers(0, 9, (_most(is_job_batch), VOCAB)).astype(np.uint32)
    counts = board.filled(rank, old.view(np.int32).reshape(-1), "i32")
    board.writable(counts)
    board.writable(slots)
    batch = _batch(board, rank, {row: BatchRow(int(ids[POSITION]), POSITION, index, RowSample.DRAW)}, is_job_batch)
    board.graph.add(
        CountTokens(
            rank,
            "count_tokens",
            slots=slots,
            counts=counts,
            batch=batch,
            tables=tables,
            num_slots=_most(is_job_batch),
            is_job_batch=is_job_batch,
        )
    )

    def check(memory: Memory) -> None:
        want = old.copy()
        for position in range(NUM_COUNTED, POSITION + 1):
            if position < slot.prompt_len:
                want[index, ids[position]] |= COUNT_IN_PROMPT
            else:
                want[index, ids[position]] += 1
        got = memory[counts.buffer].reshape(-1).view(np.uint32).reshape(_most(is_job_batch), VOCAB)
        assert (got == want).all(), np.argwhere(got != want)[:8]
        after = (SlotSampling * _most(is_job_batch)).from_buffer_copy(memory[slots.buffer].tobytes())[index]
        assert after.num_counted == POSITION + 1

    board.expect(rank, "count_tokens", f"count_tokens of row {row} slot {index} is_job_batch={is_job_batch}", check)


def sample_row(board: Board, rank: int, num_sections: int, is_job_batch: bool, undrawn: int | None = None) -> None:
    """With every parameter: a token that can be drawn, and its logprobs.

    undrawn: what stands for the token if the mask is that of another position, or allows no token.
    """
    most, case = _most(is_job_batch), make_cases(board.rng)[-1]
    if undrawn == NO_TOKEN_ALLOWED:
        case = replace(case, allowed=case.banned)
    row, index = int(board.rng.integers(most)), int(board.rng.integers(most))
    stride = section_stride(VOCAB, num_sections)
    logits = np.zeros((most, num_sections * stride), np.float32)
    for section, (begin, end) in enumerate(partition(VOCAB, num_sections)):
        logits[row, section * stride :][: end - begin] = case.logits[begin:end]
    biases = (Bias * (len(case.bias) + len(case.banned)))(*case.bias.items(), *((each, 0.0) for each in case.banned))
    position = POSITION + int(board.rng.choice([-1, 0, 2])) if undrawn == PENDING_TOKEN else POSITION + 1
    mask = pack_mask(VOCAB, case.allowed or (), position)
    tables = _tables(board, rank, mask.tobytes() + bytes(biases))
    slot = make_slot(case, 99, num_logprobs=NUM_BEST)
    slots = _slots(board, rank, index, slot, "mask", tables, is_job_batch)
    begin = index * ctypes.sizeof(SlotSampling) + SlotSampling.biases.offset
    board.pointers.append((slots, begin, tables, TABLES_BYTES // 2 + mask.nbytes))
    counts = np.zeros((most, VOCAB), np.uint32)
    counts[index, list(case.in_output)] = list(case.in_output.values())
    counts[index, list(case.in_prompt)] |= np.uint32(COUNT_IN_PROMPT)
    drawn, record = (board.buffer(size, dtype="u8").at(rank) for size in (DRAWN_BYTES, RECORD_BYTES))
    adjusted = board.buffer(logits.shape[1]).at(rank)
    words = board.buffer(mask_vector_words(VOCAB), dtype="i32").at(rank)
    for region in (drawn, adjusted, words) if undrawn else (drawn, record, adjusted, words):
        board.writable(region)
    board.graph.add(
        SampleRow(
            rank,
            "sample_row",
            logits=board.filled(rank, logits, "f32", rows=most),
            slots=slots,
            counts=board.filled(rank, counts.view(np.int32).reshape(-1), "i32"),
            mask=words,
            adjusted=adjusted,
            drawn=drawn,
            record=record,
            batch=_batch(board, rank, {row: BatchRow(0, POSITION, index, RowSample.DRAW)}, is_job_batch),
            tables=tables,
            row=row,
            num_ranks=num_sections,
            num_slots=most,
            is_job_batch=is_job_batch,
        )
    )

    def check(memory: Memory) -> None:
        token = int(memory[drawn.buffer].reshape(-1).view(CANDIDATE)["token"][0])
        if undrawn:
            assert token == undrawn, f"{token} was drawn, want {undrawn}"
            return
        assert 0 <= token < VOCAB and distribution(case)[token] > 0, f"{token} was drawn"
        found, want = memory[record.buffer].reshape(-1).view(RECORD)[0], case.logits.log_softmax(0)
        assert (found["token"], found["num"]) == (token, NUM_BEST)
        assert found["tokens"][:NUM_BEST].tolist() == want.topk(NUM_BEST).indices.tolist()
        assert_close("logprob ", found["logprob"], want[token], 2e-5)

    board.expect(
        rank,
        "sample_row",
        f"sample_row {row} slot {index} of {num_sections} sections is_job_batch={is_job_batch} undrawn={undrawn}",
        check,
    )
