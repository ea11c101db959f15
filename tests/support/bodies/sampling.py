"""Cases of the sampling tasks. The distribution of draws is tested in tasks/test_sample_row.py."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from support.bodies.board import Board, f32
from support.sampling_board import CANDIDATE, RECORD, make_slot
from support.sampling_cases import VOCAB, Case, distribution, make_cases

from distmk.abi import COUNT_IN_PROMPT, MAX_ROWS, Batch, BatchRow, Bias, RowSample, SlotSampling, Space
from distmk.graph.regions import Region
from distmk.model.shards import partition
from distmk.tasks import CountTokens, SampleRow, SendLogits
from distmk.tasks.sampling import DRAWN_BYTES, RECORD_BYTES, mask_words, section_stride
from distmk.testing.arrays import assert_close
from distmk.testing.memory import Memory

SLOT, POSITION, NUM_BEST = 5, 40, 7
TABLES_BYTES = 12288  # whole pages, so that an access that is not declared is seen
NUM_COUNTED = 3


def _batch(board: Board, rank: int, row: int, token: int) -> Region:
    batch = Batch(num_rows=row + 1, num_runs=row + 1)
    batch.rows[row] = BatchRow(token, POSITION, SLOT, RowSample.DRAW)
    return board.filled(rank, batch, "u8", space=Space.HEAP)


def _tables(board: Board, rank: int, content: bytes) -> Region:
    """A buffer with the content in its middle."""
    raw = np.zeros(TABLES_BYTES, np.uint8)
    raw[TABLES_BYTES // 2 :][: len(content)] = np.frombuffer(content, np.uint8)
    return board.filled(rank, raw, "u8")


def _slots(board: Board, rank: int, slot: SlotSampling, field: str, tables: Region) -> Region:
    """Parameters of all slots; `field` of SLOT will point to the content of `tables`."""
    slots = (SlotSampling * MAX_ROWS)()
    slots[SLOT] = slot
    region = board.filled(rank, np.frombuffer(slots, np.uint8).copy(), "u8")
    begin = SLOT * ctypes.sizeof(SlotSampling) + getattr(SlotSampling, field).offset
    board.pointers.append((region, begin, tables, TABLES_BYTES // 2))
    return region


def send_logits(board: Board, rank: int) -> None:
    """Columns of the rows that need their logits, and of no others, to rank 0."""
    num_cols, rows = int(board.rng.integers(1, 200)), 6
    batch = Batch(num_rows=rows, num_runs=rows)
    for row in range(rows):
        batch.rows[row] = BatchRow(0, 1, row, row % 4)
    sent = [row for row in range(rows) if row % 4 >= RowSample.DRAW]
    logits = board.buffer(num_cols + 8, MAX_ROWS, space=Space.HEAP)
    region, data = logits.at(rank, 3, 3 + num_cols), torch.randn(MAX_ROWS, num_cols)
    board.fill(region, data)
    for row in sent:
        board.writable(region.on(0), first_row=row)
    rows_region = board.filled(rank, batch, "u8", space=Space.HEAP)
    board.graph.add(SendLogits(rank, "send_logits", logits=region, batch=rows_region))

    def check(memory: Memory) -> None:
        assert_close("", f32(memory, region.on(0), rows)[sent], data[sent], 0)

    board.expect(0, "sample", f"send_logits of {num_cols}", check, of=rank)


def count_tokens(board: Board, rank: int) -> None:
    """The tokens since the last draw are counted; those of other slots stay."""
    ids = board.rng.integers(0, VOCAB, POSITION + 1).astype(np.int32)
    tables = _tables(board, rank, ids.tobytes())
    slot = make_slot(Case("", torch.zeros(VOCAB), in_prompt=frozenset({0})), 0)
    slot.prompt_len, slot.num_counted = POSITION // 2, NUM_COUNTED
    slots = _slots(board, rank, slot, "tokens", tables)
    old = board.rng.integers(0, 9, (MAX_ROWS, VOCAB)).astype(np.uint32)
    counts = board.filled(rank, old.view(np.int32).reshape(-1), "i32")
    board.writable(counts)
    board.writable(slots)
    batch = _batch(board, rank, 2, int(ids[POSITION]))
    board.graph.add(CountTokens(rank, "count_tokens", slots=slots, counts=counts, batch=batch, tables=tables))

    def check(memory: Memory) -> None:
        want = old.copy()
        for position in range(NUM_COUNTED, POSITION + 1):
            if position < slot.prompt_len:
                want[SLOT, ids[position]] |= COUNT_IN_PROMPT
            else:
                want[SLOT, ids[position]] += 1
        got = memory[counts.buffer].reshape(-1).view(np.uint32).reshape(MAX_ROWS, VOCAB)
        assert (got == want).all(), np.argwhere(got != want)[:8]
        after = (SlotSampling * MAX_ROWS).from_buffer_copy(memory[slots.buffer].tobytes())[SLOT]
        assert after.num_counted == POSITION + 1

    board.expect(rank, "count_tokens", "count_tokens", check)


def sample_row(board: Board, rank: int, num_sections: int) -> None:
    """With every parameter: a token that can be drawn, and its logprobs."""
    row, case = int(board.rng.integers(MAX_ROWS)), make_cases(board.rng)[-1]
    stride = section_stride(VOCAB, num_sections)
    logits = np.zeros((MAX_ROWS, num_sections * stride), np.float32)
    for section, (begin, end) in enumerate(partition(VOCAB, num_sections)):
        logits[row, section * stride :][: end - begin] = case.logits[begin:end]
    biases = (Bias * (len(case.bias) + len(case.banned)))(*case.bias.items(), *((each, 0.0) for each in case.banned))
    tables = _tables(board, rank, bytes(biases))
    slot = make_slot(case, 99, num_logprobs=NUM_BEST)
    slots = _slots(board, rank, slot, "biases", tables)
    counts, mask = np.zeros((MAX_ROWS, VOCAB), np.uint32), np.zeros((MAX_ROWS, 32 * mask_words(VOCAB)), np.uint8)
    counts[SLOT, list(case.in_output)] = list(case.in_output.values())
    counts[SLOT, list(case.in_prompt)] |= np.uint32(COUNT_IN_PROMPT)
    mask[SLOT, list(case.allowed or ())] = 1
    drawn, record = (board.buffer(size, dtype="u8").at(rank) for size in (DRAWN_BYTES, RECORD_BYTES))
    adjusted = board.buffer(logits.shape[1]).at(rank)
    for region in (drawn, record, adjusted):
        board.writable(region)
    board.graph.add(
        SampleRow(
            rank,
            "sample_row",
            logits=board.filled(rank, logits, "f32", rows=MAX_ROWS),
            slots=slots,
            counts=board.filled(rank, counts.view(np.int32).reshape(-1), "i32"),
            mask=board.filled(rank, np.packbits(mask, axis=1, bitorder="little").reshape(-1).view(np.int32), "i32"),
            adjusted=adjusted,
            drawn=drawn,
            record=record,
            batch=_batch(board, rank, row, 0),
            tables=tables,
            row=row,
            num_ranks=num_sections,
        )
    )

    def check(memory: Memory) -> None:
        token = int(memory[drawn.buffer].reshape(-1).view(CANDIDATE)["token"][0])
        assert 0 <= token < VOCAB and distribution(case)[token] > 0, f"{token} was drawn"
        found, want = memory[record.buffer].reshape(-1).view(RECORD)[0], case.logits.log_softmax(0)
        assert (found["token"], found["num"]) == (token, NUM_BEST)
        assert found["tokens"][:NUM_BEST].tolist() == want.topk(NUM_BEST).indices.tolist()
        assert_close("logprob ", found["logprob"], want[token], 2e-5)

    board.expect(rank, "sample_row", f"sample_row of {num_sections} sections", check)
