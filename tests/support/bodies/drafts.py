"""Cases of the tasks of drafts."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import numpy as np
from support.bodies.board import Board
from support.sampling_board import CANDIDATE, RECORD, make_slot
from support.sampling_cases import VOCAB, distribution, make_cases

from distmk.abi import (
    COUNT_IN_PROMPT,
    MAX_BUCKET_ROWS,
    MAX_ROWS,
    MAX_SEQUENCES,
    NO_TOKEN_ALLOWED,
    PENDING_TOKEN,
    Batch,
    BatchRow,
    DraftSlot,
    DraftSource,
    JobBatch,
    RowSample,
    SlotSampling,
    Space,
)
from distmk.graph.regions import Region
from distmk.tasks import AcceptDrafts, ProposeDrafts, VerifyRow
from distmk.tasks.drafting import drafts_bytes
from distmk.tasks.sampling import DRAWN_BYTES, RECORD_BYTES, mask_vector_words, section_stride
from distmk.testing.memory import Memory

LENGTH = 60  # ids that a sequence has room for
Ids = list[int]


def _most(is_job_batch: bool) -> int:
    return MAX_SEQUENCES if is_job_batch else MAX_ROWS


def _batch(board: Board, rows: list[BatchRow], is_job_batch: bool) -> Region:
    if is_job_batch:
        batch = JobBatch(Batch(num_rows=len(rows), num_job_rows=MAX_BUCKET_ROWS))
    else:
        batch = Batch(num_rows=len(rows), num_runs=len(rows))
    for index, row in enumerate(rows):
        batch.rows[index] = row
    return board.filled(0, batch, "u8", space=Space.HEAP)


def _slots(board: Board, ids: dict[int, Ids], num_tokens: dict[int, int], is_job_batch: bool) -> tuple[Region, Region]:
    """The drafts of all slots, and the ids of sequences in a row for each slot of `ids`; both may be written."""
    table = np.full((len(ids), LENGTH), -1, np.int32)
    for row, tokens in enumerate(ids.values()):
        table[row, : len(tokens)] = tokens
    tables = board.writable(board.filled(0, table.view(np.uint8).reshape(-1), "u8"))
    most = _most(is_job_batch)
    slots = (DraftSlot * most)()
    for slot, num in num_tokens.items():
        slots[slot].num_tokens, slots[slot].num_drafts = num, 99
    raw = np.zeros(drafts_bytes(most), np.uint8)
    raw[: ctypes.sizeof(slots)] = np.frombuffer(slots, np.uint8)
    drafts = board.writable(board.filled(0, raw, "u8"))
    for row, slot in enumerate(ids):
        begin = slot * ctypes.sizeof(DraftSlot) + DraftSlot.tokens.offset
        board.pointers.append((drafts, begin, tables, row * 4 * LENGTH))
    return drafts, tables


def _found(
    memory: Memory, drafts: Region, tables: Region, is_job_batch: bool
) -> tuple[ctypes.Array[DraftSlot], np.ndarray]:
    slots = (DraftSlot * _most(is_job_batch)).from_buffer_copy(memory[drafts.buffer].tobytes())
    return slots, memory[tables.buffer].reshape(-1).view(np.int32).reshape(-1, LENGTH)


def accept(board: Board, is_job_batch: bool) -> None:
    """Runs of drafts that are right up to some place, scored rows before some of them, and rows that are not sampled. Some
    sequences have no draft, and get no token.
    """
    rng, most = board.rng, _most(is_job_batch)
    rows: list[BatchRow] = []
    given: list[tuple[float, int]] = []  # the token of each row, as the best candidate or drawn
    ids, before, after = dict[int, Ids](), dict[int, int](), dict[int, Ids]()
    for slot in rng.permutation(most)[: most // 3].tolist():
        has_token = bool(rng.random() < 0.8)
        num = int(rng.integers(1, 6)) if has_token else 0
        if len(rows) + num + 3 > most:
            break
        position, draws = int(rng.integers(5, 40)), not has_token or bool(rng.integers(2))
        tokens = rng.integers(0, VOCAB, position + 1).tolist()
        for sample in (RowSample.SCORE, RowSample.NONE)[: int(rng.integers(3))]:
            rows.append(BatchRow(tokens[-2], position - 1, slot, sample))
            given.append((0.0, -1))
        drafts = rng.integers(0, VOCAB, num).tolist()
        right = int(rng.integers(num + 1))
        if not has_token:
            wanted = [int(rng.choice([PENDING_TOKEN, NO_TOKEN_ALLOWED]))]
        else:
            wanted = [*drafts[:right], *(int(rng.integers(VOCAB, 2 * VOCAB)) for _ in range(num - right + 1))][
                : num + 1
            ]
        for index, token in enumerate([tokens[-1], *drafts]):
            sample = (RowSample.VERIFY if index else RowSample.DRAW) if draws else RowSample.GREEDY
            rows.append(BatchRow(token, position + index, slot, sample))
            given.append((1.0 if draws else 0.0, wanted[index]))
        ids[slot], before[slot], after[slot] = (
            [*tokens, *drafts],
            len(tokens),
            [*tokens, *drafts[:right], *wanted[right : right + has_token]],
        )
    candidates = np.zeros((board.num_ranks, most), CANDIDATE)
    candidates["value"], candidates["token"] = (
        rng.normal(0, 1, candidates.shape),
        rng.integers(0, VOCAB, candidates.shape),
    )
    drawn = np.zeros(most, CANDIDATE)
    for index, (is_drawn, token) in enumerate(given):
        if is_drawn:
            drawn[index]["token"] = token
        else:
            candidates[int(rng.integers(board.num_ranks)), index] = (100.0, token)
    drafts, tables = _slots(board, ids, before, is_job_batch)
    board.graph.add(
        AcceptDrafts(
            0,
            "accept_drafts",
            candidates=board.filled(0, candidates, "u8", space=Space.HEAP),
            drawn=board.filled(0, drawn, "u8"),
            drafts=drafts,
            batch=_batch(board, rows, is_job_batch),
            tables=tables,
            num_ranks=board.num_ranks,
            num_rows=most,
            num_slots=most,
            is_job_batch=is_job_batch,
        )
    )

    def check(memory: Memory) -> None:
        slots, table = _found(memory, drafts, tables, is_job_batch)
        for row, (slot, want) in enumerate(after.items()):
            found = slots[slot]
            assert (found.num_tokens, found.num_drafts) == (len(want), 0), f"slot {slot}: {found.num_tokens}"
            assert table[row, : len(want)].tolist() == want, f"slot {slot}: {table[row]}, want {want}"

    board.expect(0, "accept_drafts", f"accept_drafts of {len(rows)} rows is_job_batch={is_job_batch}", check)


def proposal(ids: Ids, source: DraftSource, least: int, most: int, num: int, per_match: float) -> Ids:
    """The drafts behind `ids`: the best match by length, then by place."""
    best, at = 0, 0
    for end in range(1, len(ids)):
        length = 0
        while length < min(most, end) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= least and (length > best or (length == best and source is DraftSource.LATEST)):
            best, at = length, end
    if not best:
        return []
    text = list(ids)
    for index in range(min(num, int(best * per_match))):
        text.append(text[at + index])
    return text[len(ids) :]


def propose(board: Board, source: DraftSource, is_job_batch: bool) -> None:
    """Sequences of few different tokens, so that there are matches of many lengths."""
    rng, most = board.rng, _most(is_job_batch)
    least, longest, num, per_match = int(rng.integers(1, 4)), int(rng.integers(4, 12)), int(rng.integers(1, 16)), 1.5
    rows: list[BatchRow] = []
    ids, given = dict[int, Ids](), dict[int, Ids]()
    for slot in rng.permutation(most)[:9].tolist():
        tokens = rng.integers(0, int(rng.integers(2, 9)), int(rng.integers(1, LENGTH + 1))).tolist()
        ids[slot], given[slot] = tokens, [*tokens, *rng.integers(0, 9, LENGTH - len(tokens)).tolist()]
        rows.append(BatchRow(tokens[-1], len(tokens) - 2, slot, RowSample.GREEDY))
    drafts, tables = _slots(board, given, {slot: len(each) for slot, each in ids.items()}, is_job_batch)
    board.graph.add(
        ProposeDrafts(
            0,
            "propose_drafts",
            drafts=drafts,
            batch=_batch(board, rows, is_job_batch),
            tables=tables,
            num_rows=most,
            num_slots=most,
            is_job_batch=is_job_batch,
            source=source,
            max_drafts=num,
            min_match=least,
            max_match=longest,
            drafts_per_match=int(256 * per_match),
            max_ids=LENGTH,
        )
    )

    def check(memory: Memory) -> None:
        slots, table = _found(memory, drafts, tables, is_job_batch)
        for row, (slot, tokens) in enumerate(ids.items()):
            most_here = min(num, LENGTH - len(tokens))
            if source is DraftSource.GIVEN:
                want = given[slot][len(tokens) :][:most_here]
            else:
                want = proposal(tokens, source, least, longest, most_here, per_match)
            assert slots[slot].num_drafts == len(want), f"slot {slot}: {slots[slot].num_drafts}, want {want}"
            found = table[row, len(tokens) :][: len(want)].tolist()
            assert found == want, f"slot {slot}: {found}, want {want} behind {tokens}"

    what = f"propose_drafts {source.name} of {least} to {longest} is_job_batch={is_job_batch}"
    board.expect(0, "propose_drafts", what, check)


def verify(board: Board, num_drafts: int, is_job_batch: bool) -> None:
    """The best token of the last of a run's rows, whose drafts and those before it are penalized like output."""
    rng, most = board.rng, _most(is_job_batch)
    case = replace(
        make_cases(rng)[-1], allowed=None, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, frequency_penalty=2.5
    )
    likely = case.logits.topk(3).indices.tolist()
    drafts = [likely[index % 2] for index in range(num_drafts)]  # each several times
    index, slot = int(rng.integers(most - num_drafts)), int(rng.integers(most))
    row, stride = index + num_drafts, section_stride(VOCAB, 1)
    rows = [BatchRow(0, 3, (slot + 1) % most, RowSample.DRAW) for _ in range(index)]
    rows.append(BatchRow(5, 40, slot, RowSample.DRAW))
    rows += [BatchRow(token, 41 + at, slot, RowSample.VERIFY) for at, token in enumerate(drafts)]
    slots, counts = (SlotSampling * most)(), np.zeros((most, VOCAB), np.uint32)
    slots[slot] = make_slot(replace(case, bias={}, banned=()), 99, num_logprobs=0)
    counts[slot, list(case.in_output)] = list(case.in_output.values())
    counts[slot, list(case.in_prompt)] |= np.uint32(COUNT_IN_PROMPT)
    logits = np.zeros((most, stride), np.float32)
    logits[row, :VOCAB] = case.logits
    drawn, record = (board.writable(board.buffer(size, dtype="u8").at(0)) for size in (DRAWN_BYTES, RECORD_BYTES))
    board.graph.add(
        VerifyRow(
            0,
            "verify_row",
            logits=board.filled(0, logits, "f32", rows=most),
            slots=board.filled(0, np.frombuffer(slots, np.uint8).copy(), "u8"),
            counts=board.filled(0, counts.view(np.int32).reshape(-1), "i32"),
            mask=board.buffer(mask_vector_words(VOCAB), dtype="i32").at(0),
            adjusted=board.writable(board.buffer(stride).at(0)),
            drawn=drawn,
            record=record,
            batch=_batch(board, rows, is_job_batch),
            row=row,
            num_slots=most,
            is_job_batch=is_job_batch,
        )
    )

    def check(memory: Memory) -> None:
        in_output = dict(Counter(case.in_output) + Counter(drafts))
        want = int(distribution(replace(case, bias={}, banned=(), in_output=in_output)).argmax())
        token = int(memory[drawn.buffer].reshape(-1).view(CANDIDATE)["token"][0])
        assert token == want, f"{token} was drawn, want {want}; drafts {drafts}"
        assert memory[record.buffer].reshape(-1).view(RECORD)[0]["token"] == want

    board.expect(0, "verify_row", f"verify_row behind {num_drafts} drafts is_job_batch={is_job_batch}", check)
