"""Tasks that move or add up a little data: embed, put, affine, sum, sample."""

from __future__ import annotations

import numpy as np
import torch
from support.arrays import assert_close
from support.batches import decode_batch
from support.bodies.board import Board, Memory, f32
from support.bodies.linear import CANDIDATE, batch_of

from distmk.abi import MAX_ROWS, Epilogue, Space
from distmk.graph.regions import Region
from distmk.tasks import Affine, Embed, Put, Sample, Sine, Sum
from distmk.tasks.scheduling import CANDIDATES_BYTES

FIRST_TOKEN, LAST_TOKEN = 300, 700  # of an embedding's rows


def embed(board: Board, num_rows: int, pushed: bool) -> None:
    """Columns of the table's rows; pushed, every rank's block in every rank's slots."""
    k = int(board.rng.integers(8, 300))
    begin = int(board.rng.integers(0, k))
    n = int(board.rng.integers(1, k - begin + 1))
    room = MAX_ROWS * n
    slots = board.buffer(room * board.num_ranks, space=Space.HEAP) if pushed else None
    for rank in range(board.num_ranks):
        out = slots.at(rank, rank * room, (rank + 1) * room) if slots else board.wide(rank, n, MAX_ROWS)
        _embed(board, rank, num_rows, (k, begin, n), out, pushed)
    for rank in range(board.num_ranks) if slots else ():  # what was pushed is read before more may come
        sink = board.written(board.wide(rank, slots.cols, 1))
        board.graph.add(Affine(rank, "read blocks", src=slots.at(rank), dst=sink))


def _embed(board: Board, rank: int, num_rows: int, cols: tuple[int, int, int], out: Region, pushed: bool) -> None:
    (k, begin, n), epilogue = cols, Epilogue.PUSH if pushed else Epilogue.STORE
    batch, table = decode_batch(num_rows, board.rng), torch.randn(LAST_TOKEN - FIRST_TOKEN, k).bfloat16()
    edges = board.rng.permutation([FIRST_TOKEN - 1, FIRST_TOKEN, LAST_TOKEN - 1, LAST_TOKEN])
    for row, token in zip(range(num_rows), edges, strict=False):
        batch.rows[row].token = int(token)
    want = torch.zeros(num_rows, n)  # zeros where the token is another rank's
    for row in range(num_rows):
        if FIRST_TOKEN <= batch.rows[row].token < LAST_TOKEN:
            want[row] = table[batch.rows[row].token - FIRST_TOKEN, begin : begin + n].float()
    out_bf16 = None if pushed else board.written(board.wide(rank, n, MAX_ROWS, dtype="bf16"), num_rows)
    what = f"embed {epilogue.name} k={k} columns {begin} to {begin + n} rows={num_rows}"
    board.graph.add(
        Embed(
            rank,
            what,
            table=board.table(rank, table),
            out=out,
            out_bf16=out_bf16,
            batch=board.give_all(rank, batch, "u8", space=Space.HEAP),
            col_begin=begin,
            num_cols=n,
            first_token=FIRST_TOKEN,
            epilogue=epilogue,
            num_ranks=board.num_ranks,
        )
    )
    for target in range(board.num_ranks) if pushed else (rank,):
        # A block is [rows, n] without gaps, whatever room there is.
        region = Region(out.buffer, target, out.begin, out.begin + (num_rows * n if pushed else n))
        board.written(region, 1 if pushed else num_rows)

        def check(memory: Memory, region: Region = region) -> None:
            assert_close("", f32(memory, region, 1 if pushed else num_rows).reshape(num_rows, n), want, 0)
            if out_bf16:
                assert_close("rounded ", f32(memory, out_bf16, num_rows), want, 0)

        board.check(target, f"{what} by rank {rank}", check)


def put_and_affine(board: Board, rank: int) -> None:
    """Numbers to the next rank, where they are scaled."""
    to, num = (rank + 1) % board.num_ranks, int(board.rng.integers(1, 3000))
    data = torch.randn(1, num)
    scale, shift = (float(np.float32(board.rng.normal())) for _ in range(2))
    got, scaled = board.wide(to, num, 1, Space.HEAP), board.wide(to, num, 1)
    board.graph.add(Put(rank, "put", src=board.give(board.wide(rank, num, 1), data), dst=board.written(got)))
    board.graph.add(Affine(to, "affine", src=got, dst=board.written(scaled), scale=scale, shift=shift))

    def check(memory: Memory) -> None:
        assert_close("put ", f32(memory, got), data, 0)
        want = data.double() * scale + shift
        assert_close("affine ", f32(memory, scaled), want, 1e-6 + 1e-6 * want.abs())

    board.check(to, f"put and affine of {num}", check)


def sines(board: Board, rank: int) -> None:
    """Sines of sines."""
    num, times = int(board.rng.integers(1, 3000)), int(board.rng.integers(0, 40))
    data = torch.randn(1, num)
    out, what = board.written(board.wide(rank, num, 1)), f"sine of {num}, {times} times"
    board.graph.add(Sine(rank, what, src=board.give(board.wide(rank, num, 1), data), dst=out, times=times))
    want = data.double()
    for _ in range(times):
        want = want.sin()
    board.check(rank, what, lambda memory: assert_close("sine ", f32(memory, out), want, 1e-6))


def put_bytes(board: Board, rank: int) -> None:
    """Any number of bytes, to an address that is a multiple of 4 and perhaps of no more."""
    to, num = (rank + 1) % board.num_ranks, int(board.rng.integers(1, 5000))
    raw = board.rng.integers(0, 256, num, dtype=np.uint8)
    begin = 4 * int(board.rng.integers(0, 5))
    out = board.written(board.buffer(begin + num, dtype="u8", space=Space.HEAP).at(to, begin))
    board.graph.add(Put(rank, "put bytes", src=board.give_all(rank, raw, "u8"), dst=out))

    def check(memory: Memory) -> None:
        assert_close("", memory[out.buffer][0, begin:], raw, 0)

    board.check(to, f"put of {num} bytes to byte {begin}", check)


def sum_of_blocks(board: Board, rank: int, num_rows: int) -> None:
    """Several blocks at equal distances, with room between them."""
    batch, _ = batch_of(board, rank, num_rows)
    rows, room = num_rows or 1, MAX_ROWS if num_rows else 1
    n, num_blocks, add = int(board.rng.integers(1, 101)), int(board.rng.integers(1, 7)), bool(board.rng.integers(2))
    stride = n * room + int(board.rng.integers(0, 5))
    source = board.buffer(num_blocks * stride)
    data, old = torch.randn(num_blocks, rows, n), torch.randn(rows, n)
    for b in range(num_blocks):
        board.give(source.at(rank, b * stride, b * stride + rows * n), data[b].reshape(1, -1))
    dst = board.wide(rank, n, room)
    if add:
        board.give(dst, old)
    what = f"sum of {num_blocks} blocks of {n} rows={num_rows or 'one'} add={add}"
    blocks = tuple(source.at(rank, b * stride, b * stride + n * room) for b in range(num_blocks))
    board.graph.add(Sum(rank, what, blocks=blocks, dst=board.written(dst, rows), batch=batch, add=add))

    def check(memory: Memory) -> None:
        total = old.clone() if add else torch.zeros_like(old)
        for block in data:
            total += block
        assert_close("", f32(memory, dst, rows), total, 0)

    board.check(rank, what, check)


def sample(board: Board, rank: int, num_tasks: int) -> None:
    """The best candidate of every sampled row, to rank 0, perhaps from the same place on this rank."""
    batch = decode_batch(int(board.rng.integers(1, 17)), board.rng)
    candidates = np.zeros((num_tasks, MAX_ROWS), dtype=CANDIDATE)
    # Few different values, so that ties are common; some tasks have nothing for a row.
    candidates["value"] = board.rng.integers(-3, 3, candidates.shape)
    candidates["token"] = np.arange(num_tasks)[:, None] * 100 + board.rng.integers(0, 100, candidates.shape)
    candidates["token"][board.rng.random(candidates.shape) < 0.2] = -1
    unsampled = [row for row in range(batch.num_rows) if not batch.rows[row].sample]
    candidates["token"][:, unsampled] = -1  # as the head's tasks leave it
    out = board.buffer(CANDIDATES_BYTES, dtype="u8", space=Space.HEAP).at(0)
    what = f"sample of {num_tasks} tasks on rank {rank}"
    given = board.give_all(rank, candidates, "u8")
    rows = board.give_all(rank, batch, "u8", space=Space.HEAP)
    board.graph.add(Sample(rank, what, candidates=given, out=out, batch=rows))

    def check(memory: Memory) -> None:
        got = memory[out.buffer].reshape(-1).view(CANDIDATE)
        for row in range(batch.num_rows):
            valid = candidates[:, row][candidates[:, row]["token"] >= 0]
            if not len(valid):
                assert got[row]["token"] == -1, f"row {row}: {got[row]} from nothing"
                continue
            best = valid["value"].max()
            want = (best, valid["token"][valid["value"] == best].min())
            assert got[row].item() == want, f"row {row}: {got[row]}, expected {want}"

    for where in {0, rank}:
        board.written(out.on(where))
    board.check(0, what, check)
