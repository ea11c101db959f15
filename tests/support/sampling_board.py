"""A graph of many `sample_row` tasks: row r of each of its batches has slot r, and every batch another position."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from support.sampling_cases import Case

from distmk import Graph, Session
from distmk.abi import (
    COUNT_IN_PROMPT,
    MAX_ROWS,
    Batch,
    BatchRow,
    Bias,
    LogprobRecord,
    RowSample,
    SamplingFlag,
    SlotSampling,
    TokenMask,
)
from distmk.graph.regions import Buffer, Region
from distmk.model.shards import partition
from distmk.tasks import SampleRow
from distmk.tasks.sampling import (
    DRAWN_BYTES,
    RECORD_BYTES,
    SLOT_BYTES,
    mask_vector_words,
    section_stride,
)

TABLE_BYTES = 1024  # of a slot
CANDIDATE = np.dtype([("value", "f4"), ("token", "i4")])
RECORD = np.dtype(
    [("token", "i4"), ("logprob", "f4"), ("rank", "u4"), ("num", "u4"), ("tokens", "i4", 20), ("logprobs", "f4", 20)]
)


def make_slot(case: Case, seed: int, **more: Any) -> SlotSampling:
    """The parameters of a case; of `banned` tokens, as if the minimum length were never reached."""
    numbers = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return SlotSampling(
        **{name: getattr(case, name) for name in numbers},
        seed=seed,
        prompt_len=1,
        min_tokens=0x7FFFFFFF if case.banned else 0,
        num_biases=len(case.bias),
        num_banned=len(case.banned),
        flags=SamplingFlag.PENALTIES * case.penalizes,
        **{"num_logprobs": -1, "num_prompt_logprobs": -1} | more,
    )


def pack_mask(vocab: int, allowed: Iterable[int], position: int) -> np.ndarray:
    """A TokenMask for the token at `position`, u8; bits beyond the vocabulary are set, and not to be seen."""
    bits = np.ones(32 * mask_vector_words(vocab), np.uint8)
    bits[:vocab] = 0
    bits[list(allowed)] = 1
    return np.concatenate([np.frombuffer(TokenMask(position), np.uint8), np.packbits(bits, bitorder="little")])


class SamplingBoard:
    """`num_batches` batches of a row for each case, over a vocabulary of `vocab` in `num_sections` sections."""

    def __init__(self, vocab: int, num_sections: int, num_batches: int, num_workers: int) -> None:
        self.vocab, self.num_sections, self.num_batches = vocab, num_sections, num_batches
        self.stride = section_stride(vocab, num_sections)
        graph = self.graph = Graph(1, num_workers)
        cols, num_tasks = num_sections * self.stride, num_batches * MAX_ROWS
        self.logits = graph.buffer("logits", cols, rows=MAX_ROWS)
        # A mask is for one position, so every batch has slots and masks of its own.
        self.slots = graph.buffer("slots", num_tasks * SLOT_BYTES, dtype="u8")
        self.counts = graph.buffer("counts", MAX_ROWS * vocab, dtype="i32")
        self.mask_bytes = ctypes.sizeof(TokenMask) + 4 * mask_vector_words(vocab)
        self.tables = graph.buffer("tables", MAX_ROWS * TABLE_BYTES + num_tasks * self.mask_bytes, dtype="u8")
        self.words = graph.buffer("words", num_tasks * mask_vector_words(vocab), dtype="i32")
        self.adjusted = graph.buffer("adjusted", num_tasks * cols)
        self.drawn = graph.buffer("drawn", num_tasks * DRAWN_BYTES, dtype="u8")
        self.records = graph.buffer("records", num_tasks * RECORD_BYTES, dtype="u8")
        self.batches = [graph.buffer(f"batch{i}", ctypes.sizeof(Batch), dtype="u8") for i in range(num_batches)]
        for index, batch in enumerate(self.batches):
            for row in range(MAX_ROWS):
                self._add(index * MAX_ROWS + row, batch, row, cols)

    def _add(self, index: int, batch: Buffer, row: int, cols: int) -> None:
        def part(buffer: Buffer, size: int) -> Any:
            return buffer.at(0, index * size, (index + 1) * size)

        self.graph.add(
            SampleRow(
                0,
                f"sample_row {row}",
                logits=self.logits.at(0),
                slots=self.slots_of(index // MAX_ROWS),
                counts=self.counts.at(0),
                mask=part(self.words, mask_vector_words(self.vocab)),
                adjusted=part(self.adjusted, cols),
                drawn=part(self.drawn, DRAWN_BYTES),
                record=part(self.records, RECORD_BYTES),
                batch=batch.at(0),
                tables=self.tables.at(0),
                row=row,
                num_ranks=self.num_sections,
            )
        )

    def slots_of(self, batch: int) -> Region:
        """The slots of a batch."""
        return self.slots.at(0, batch * MAX_ROWS * SLOT_BYTES, (batch + 1) * MAX_ROWS * SLOT_BYTES)

    def fill(self, session: Session, cases: Sequence[Case], slots: Sequence[SlotSampling]) -> None:
        """Logits and tables of the cases, and the slots' parameters."""
        self._cases = list(cases)
        logits = session.view(self.logits).copy().reshape(MAX_ROWS, -1)
        counts = session.view(self.counts).view(np.uint32).reshape(MAX_ROWS, self.vocab).copy()
        tables = session.view(self.tables)[0].copy()
        logits[:] = np.nan
        counts[:] = 0
        for row, case in enumerate(cases):
            for section, (begin, end) in enumerate(partition(self.vocab, self.num_sections)):
                first = section * self.stride
                logits[row, first : first + end - begin] = case.logits[begin:end]
            for token, count in case.in_output.items():
                counts[row, token] = count
            for token in case.in_prompt:
                counts[row, token] |= np.uint32(COUNT_IN_PROMPT)
            entries = [*case.bias.items(), *((token, 0.0) for token in case.banned)]
            biases = (Bias * len(entries))(*entries)
            tables[row * TABLE_BYTES :][: ctypes.sizeof(biases)] = np.frombuffer(biases, np.uint8)
            slots[row].biases = session.program.placement.operand(self.tables.at(0)) + row * TABLE_BYTES
        for buffer, array in ((self.logits, logits), (self.counts, counts), (self.tables, tables)):
            write(session, buffer, array)
        every = (SlotSampling * (self.num_batches * MAX_ROWS))(*list(slots) * self.num_batches)
        begin = session.program.placement.operand(self.tables.at(0)) + MAX_ROWS * TABLE_BYTES
        for index, slot in enumerate(every):
            if self._cases[index % MAX_ROWS].allowed is not None:
                slot.mask = begin + index * self.mask_bytes
        write(session, self.slots, np.frombuffer(every, np.uint8))

    def run(self, session: Session, first_position: int, sample: RowSample = RowSample.DRAW, rows: int = 16) -> None:
        """One launch; batch i is of position `first_position` + i in every sequence."""
        for index, buffer in enumerate(self.batches):
            batch = Batch(num_rows=rows, num_runs=rows)
            for row in range(rows):
                batch.rows[row] = BatchRow(0, first_position + index, row, sample)
            write(session, buffer, np.frombuffer(batch, np.uint8))
        tables = session.view(self.tables)[0].copy()
        masks = tables[MAX_ROWS * TABLE_BYTES :].reshape(self.num_batches, MAX_ROWS, self.mask_bytes)
        for row, case in enumerate(self._cases):
            for index in range(self.num_batches if case.allowed is not None else 0):
                masks[index, row] = pack_mask(self.vocab, case.allowed, first_position + index + 1)
        write(session, self.tables, tables)
        session.run()

    def tokens_drawn(self, session: Session) -> np.ndarray:
        """i32 [batches, rows]."""
        found = session.view(self.drawn)[0].view(CANDIDATE)["token"]
        return np.asarray(found).reshape(self.num_batches, MAX_ROWS).copy()

    def records_of(self, session: Session) -> np.ndarray:
        """LogprobRecord [batches, rows]."""
        assert RECORD.itemsize == ctypes.sizeof(LogprobRecord)
        return np.asarray(session.view(self.records)[0].view(RECORD)).reshape(self.num_batches, MAX_ROWS).copy()


def empty_case(vocab: int) -> Case:
    """What fills rows that a test has no case for."""
    return Case("empty", torch.zeros(vocab))


def write(session: Session, buffer: Buffer, array: np.ndarray) -> None:
    """Set the content of a buffer; its view is read-only on a GPU."""
    placed = session.program.placement.buffers[buffer]
    session.backend.write(placed, 0, np.ascontiguousarray(array).view(np.uint8).reshape(placed.rows, -1))
