"""Cases of the tasks of a job iteration that go row by row: embed_rows, reduce_rows, select_rows, argmax_rows."""

from __future__ import annotations

import numpy as np
import torch
from support import reference
from support.bodies.attention_jobs import activation_offsets
from support.bodies.board import Board, f32
from support.bodies.linear import CANDIDATE
from support.job_batches import make_job_batch

from distmk.abi import (
    ACTIVATION_BLOCK_COLS,
    MAX_BUCKET_ROWS,
    MAX_K_SPLITS,
    MAX_ROWS,
    MAX_SEQUENCES,
    ActivationLayout,
    JobBatch,
    Space,
)
from distmk.graph.regions import Buffer, Region
from distmk.tasks import ArgmaxRows, EmbedRows, ReduceRows, SelectRows
from distmk.tasks.activations import activation_cols, owned_rows, padded_cols
from distmk.tasks.scheduling import candidates_bytes
from distmk.testing.arrays import ROUNDING, assert_close, floats
from distmk.testing.memory import Memory

FIRST_TOKEN = 300  # of rank 0's rows of an embedding
RANK_TOKENS = 100  # rows of the embedding on each rank
EPS = 1e-5


class Activations:
    """Activations of `num_cols` columns on every rank; `tiled`: their layout; `sampled`: of the sampled rows."""

    def __init__(
        self, board: Board, num_cols: int, tiled: int, space: Space | None = None, sampled: bool = False
    ) -> None:
        self.board, self.num_cols, self.tiled = board, num_cols, tiled
        self.index = activation_offsets(MAX_BUCKET_ROWS, num_cols, tiled)
        size, rows = (
            activation_cols(num_cols, bool(tiled)),
            padded_cols(num_cols) // ACTIVATION_BLOCK_COLS if tiled and sampled else 1,
        )
        self.buffer = board.buffer(size // rows, rows, "bf16", space)  # sampled rows are the first of every block

    def fill(self, rank: int, x: torch.Tensor) -> Region:
        """Give the first rows, bf16."""
        raw = np.full(self.buffer.cols, 0x7FC0, np.uint16)
        raw[self.index[: len(x)]] = x.view(torch.int16).numpy().view(np.uint16)
        return self.board.fill(self.buffer.at(rank), raw[None])

    def writable(self, rank: int, num_rows: int) -> None:
        """The first rows, and of tiled ones the rest of their last block."""
        if not self.tiled:
            self.board.writable(self.buffer.at(rank, 0, num_rows * self.num_cols))
        for begin in range(0, self.buffer.cols if self.tiled else 0, MAX_BUCKET_ROWS * ACTIVATION_BLOCK_COLS):
            self.board.writable(self.buffer.at(rank, begin, begin + num_rows * ACTIVATION_BLOCK_COLS), self.buffer.rows)

    def read(self, memory: Memory, num_rows: int) -> np.ndarray:
        """The first rows, float32."""
        return floats(memory[self.buffer].reshape(-1), "bf16")[self.index[:num_rows]]


def owned(num_rows: int, num_ranks: int, rank: int) -> range:
    """The rows that a rank owns."""
    share = -(-num_rows // num_ranks)
    return range(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def _batches(board: Board, batch: JobBatch) -> Region:
    """The same batch on every rank."""
    buffer = board.buffer(len(bytes(batch)), dtype="u8", space=Space.HEAP)
    for rank in range(board.num_ranks):
        board.fill(buffer.at(rank), np.frombuffer(bytes(batch), np.uint8)[None])
    return buffer.at(0)


def embed_and_sum(board: Board, k: int, num_rows: int, tiled: int) -> None:
    """Every rank's rows of the embedding in its slot on the rows' owners, and their sum: in all, the embedding."""
    ranks, tokens = range(board.num_ranks), board.num_ranks * RANK_TOKENS
    table = torch.randn(tokens, k).bfloat16()
    batch = make_job_batch(board.rng, num_rows, first_token=FIRST_TOKEN, num_tokens=tokens)
    x = table[torch.tensor(list(batch.tokens[:num_rows])) - FIRST_TOKEN].float()
    parts_per_rank = int(board.rng.integers(1, MAX_K_SPLITS + 1))
    parts = board.buffer(board.num_ranks * parts_per_rank * k, owned_rows(board.num_ranks), space=Space.HEAP)
    where, what = _batches(board, batch), f"embed_rows k={k} rows={num_rows} ranks={board.num_ranks}"
    for rank in ranks:
        slot = parts.at(rank, rank * parts_per_rank * k, (rank * parts_per_rank + 1) * k)
        rows = table[rank * RANK_TOKENS : (rank + 1) * RANK_TOKENS]
        board.graph.add(
            EmbedRows(
                rank,
                what,
                table=board.table(rank, rows),
                out=slot,
                batch=where.on(rank),
                first_token=FIRST_TOKEN + rank * RANK_TOKENS,
                num_ranks=board.num_ranks,
            )
        )
        for owner in ranks:
            _expect_part(board, what, slot.on(owner), x, batch, rank)
    _sums(board, k, num_rows, tiled, parts, where, None, x, 1)


def _expect_part(board: Board, what: str, slot: Region, x: torch.Tensor, batch: JobBatch, rank: int) -> None:
    """Rows with a token of `rank` in its slot on an owner, the owner's others zero."""
    rows = owned(batch.batch.num_job_rows, board.num_ranks, slot.rank)
    want = torch.zeros(len(rows), x.shape[1])
    for i, row in enumerate(rows):
        if (batch.tokens[row] - FIRST_TOKEN) // RANK_TOKENS == rank:
            want[i] = x[row]
    board.writable(slot, len(rows))
    board.expect(
        slot.rank, "embed_rows", what, lambda memory: assert_close("", f32(memory, slot, len(rows)), want, 0), of=rank
    )


def sums(board: Board, k: int, num_rows: int, tiled: int, add: bool, behind_norm: bool | None = None) -> None:
    """The parts of every rank and split to the residual stream, and what the stream is normalized to. behind_norm: whether they
    are normalized themselves; None: perhaps.
    """
    splits = int(board.rng.integers(1, MAX_K_SPLITS + 1))
    parts_per_rank = int(board.rng.integers(splits, MAX_K_SPLITS + 1))
    data = torch.randn(board.num_ranks * parts_per_rank, num_rows, k)
    for slot in range(len(data)):
        if slot % parts_per_rank >= splits:
            data[slot] = torch.nan  # a slot that this sum leaves out
    old = torch.randn(num_rows, k) if add else None
    parts = board.buffer(len(data) * k, owned_rows(board.num_ranks))
    for rank in range(board.num_ranks):
        rows = owned(num_rows, board.num_ranks, rank)
        if rows:
            board.fill(parts.at(rank), data[:, rows.start : rows.stop].transpose(0, 1).contiguous())
    post_norm = torch.randn(k) if (board.rng.random() < 0.5 if behind_norm is None else behind_norm) else None
    total = torch.zeros(num_rows, k) if old is None or post_norm is not None else old.clone()
    for slot, part in enumerate(data):
        if slot % parts_per_rank < splits:
            total += part
    if post_norm is not None:
        total = reference.over_rms(total, EPS) * post_norm + (0 if old is None else old)
    where = _batches(board, make_job_batch(board.rng, num_rows))
    _sums(board, k, num_rows, tiled, parts, where, old, total, splits, post_norm, applies_rms=board.rng.random() < 0.7)


def _sums(
    board: Board,
    k: int,
    num_rows: int,
    tiled: int,
    parts: Buffer,
    batch: Region,
    old: torch.Tensor | None,
    total: torch.Tensor,
    num_k_splits: int,
    post_norm: torch.Tensor | None = None,
    applies_rms: bool = True,
) -> None:
    """A reduce_rows on every rank, and a select_rows that reads its output there; total: what the sums should be.

    tiled: LANE_TILES: there is a lane_out, perhaps beside an output in tiles.
    """
    lanes = Activations(board, k, tiled, Space.HEAP) if tiled == ActivationLayout.LANE_TILES else None
    tiled, x = min(tiled, int(ActivationLayout.TILES)), board.buffer(k, owned_rows(board.num_ranks))
    out = None if lanes and board.rng.random() < 0.5 else Activations(board, k, tiled, Space.HEAP)
    what = f"reduce_rows k={k} rows={num_rows} splits={num_k_splits} add={old is not None} tiled={tiled}"
    what += f" applies_rms={applies_rms}{' behind a norm' if post_norm is not None else ''}"
    want, input_norm = reference.over_rms(total, EPS if applies_rms else None), None
    if applies_rms and (lanes or not tiled) and board.rng.random() < 0.5:  # of lane_out, or of out on the host twin
        input_norm = torch.randn(k)
    weighted = want if input_norm is None else want * input_norm
    outputs = [(each, weighted if each is lanes or not tiled else want) for each in (out, lanes) if each]
    what += f" lane_out={lanes is not None} out={out is not None} norm={input_norm is not None}"
    error = 0.0 if post_norm is None else 1e-5  # of the sums
    for rank in range(board.num_ranks):
        rows = owned(num_rows, board.num_ranks, rank)
        board.writable(x.at(rank), len(rows))
        if old is not None and rows:
            board.fill(x.at(rank), old[rows.start : rows.stop])
        board.graph.add(
            ReduceRows(
                rank,
                what,
                parts=parts.at(rank),
                x=x.at(rank),
                out=out.buffer.at(rank) if out else None,
                lane_out=lanes.buffer.at(rank) if lanes else None,
                batch=batch.on(rank),
                num_ranks=board.num_ranks,
                num_k_splits=num_k_splits,
                accumulates=old is not None,
                tiled=bool(tiled),
                eps=EPS,
                post_norm=board.vector(rank, post_norm),
                applies_rms=applies_rms,
                input_norm=board.vector(rank, input_norm),
            )
        )
        for each, _ in outputs:
            each.writable(rank, num_rows)

        def check(memory: Memory, rank: int = rank, rows: range = rows) -> None:
            # Without a norm behind them bit for bit: float32 additions in the order of ranks and splits.
            assert_close("x ", f32(memory, x.at(rank), len(rows)), total[rows.start : rows.stop], error)
            noise = (1e-6 + 2 * error) * (1 if input_norm is None else input_norm.abs())
            for each, wanted in outputs:
                tolerance = ROUNDING["bf16"] * wanted.abs() + 1e-6 + noise
                assert_close("lane_out " if each is lanes else "out ", each.read(memory, num_rows), wanted, tolerance)

        board.expect(rank, "reduce_rows", what, check)
    for rank in range(board.num_ranks):  # what peers write is read before they may write again
        for each, _ in outputs:
            _select(board, rank, each, batch.on(rank))


def _select(board: Board, rank: int, x: Activations, batch: Region) -> Activations:
    """A select_rows of the rows that the batch samples."""
    out = Activations(board, x.num_cols, x.tiled, sampled=True)
    out.writable(rank, MAX_SEQUENCES)
    task = SelectRows(
        rank,
        f"select_rows k={x.num_cols} tiled={x.tiled}",
        x=x.buffer.at(rank),
        out=out.buffer.at(rank),
        batch=batch,
        k=x.num_cols,
        num_rows=MAX_SEQUENCES,
        tiled=x.tiled,
    )
    board.graph.add(task)
    return out


def select(board: Board, rank: int, k: int, num_rows: int, tiled: int) -> None:
    """Sampled rows to the first rows of the output."""
    data, batch = torch.randn(num_rows, k).bfloat16(), make_job_batch(board.rng, num_rows)
    x = Activations(board, k, tiled)
    x.fill(rank, data)
    out = _select(board, rank, x, board.filled(rank, batch, "u8", space=Space.HEAP))
    sampled = list(batch.sampled[: batch.batch.num_rows])

    def check(memory: Memory) -> None:
        assert_close("", out.read(memory, len(sampled)), data[sampled].float(), 0)

    what = f"select_rows k={k} tiled={tiled}: {sampled} of {num_rows}"
    board.expect(rank, "select_rows", what, check)


def argmax(board: Board, rank: int, num_parts: int) -> None:
    """The best logit of each sampled row in every part of the columns; few different values, so that ties are common."""
    n, first_token = int(board.rng.integers(max(num_parts, 30), 3000)), int(board.rng.integers(0, 1000))
    batch = make_job_batch(board.rng, int(board.rng.integers(MAX_ROWS, MAX_BUCKET_ROWS + 1)))
    num_rows = batch.batch.num_rows
    values = board.rng.integers(-3, 3, (num_rows, n)).astype(np.float32)
    values[:, board.rng.integers(0, n, 3)] = board.rng.normal(size=(num_rows, 3))
    values[: num_rows // 2] -= 100
    values[-1:, [n * (part + 1) // num_parts - 1 for part in range(num_parts)]] = 50  # at the end of each part
    most = int(board.rng.integers(max(num_rows, MAX_ROWS), MAX_SEQUENCES + 1))
    logits = board.padded(rank, n, most)
    if num_rows:
        board.fill(logits, values)
    out = board.writable(board.buffer(num_parts * candidates_bytes(most), dtype="u8").at(rank))
    what = f"argmax_rows of {num_rows} rows of {n} in {num_parts} parts"
    where = board.filled(rank, batch, "u8", space=Space.HEAP)
    board.graph.add(ArgmaxRows(rank, what, logits=logits, out=out, batch=where, first_token=first_token))

    def check(memory: Memory) -> None:
        got = memory[out.buffer].reshape(-1).view(CANDIDATE).reshape(num_parts, most)
        for part in range(num_parts):
            begin, end = n * part // num_parts, n * (part + 1) // num_parts
            for row in range(num_rows):
                best = begin + int(values[row, begin:end].argmax())
                want = (values[row, best], first_token + best)
                assert got[part, row].item() == want, f"part {part} row {row}: {got[part, row]}, expected {want}"

    board.expect(rank, "argmax_rows", what, check)
