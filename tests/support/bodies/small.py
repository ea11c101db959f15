"""Cases of tasks that move or add up a little data: nop, embed, put, affine, sine, sum, post_norm, sample."""

from __future__ import annotations

import numpy as np
import torch
from support import reference
from support.batches import decode_batch
from support.bodies.board import Board, f32
from support.bodies.input_norm import InputNorm
from support.bodies.linear import CANDIDATE, batch_of

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, MAX_SEQUENCES, Batch, Epilogue, Space
from distmk.graph.regions import Region
from distmk.tasks import Affine, Embed, Nop, PostNorm, Put, Sample, Sine, Sum
from distmk.tasks.scheduling import candidates_bytes
from distmk.testing.arrays import assert_close
from distmk.testing.memory import Memory

FIRST_TOKEN, LAST_TOKEN = 300, 700  # of an embedding's rows


def nop(board: Board, rank: int, to: int) -> None:
    """A task that does nothing leaves its output as it was, and is waited for: the put to another rank reads that output."""
    data = torch.randn(1, int(board.rng.integers(1, 100)))
    kept = board.fill(board.padded(rank, data.shape[1], 1), data)
    copied = board.writable(board.padded(to, data.shape[1], 1, Space.HEAP))
    board.graph.add(Nop(rank, "nop", outputs=(kept,)))
    board.graph.add(Put(rank, "put of what nop left", src=kept, dst=copied))
    what = f"nop on rank {rank}, put to {to}"
    board.expect(to, "nop", what, lambda memory: assert_close("", f32(memory, copied), data, 0), of=rank)


def embed(board: Board, num_rows: int, pushed: bool) -> None:
    """Columns of the table's rows; pushed, every rank's block in every rank's slots."""
    k = int(board.rng.integers(8, 300))
    begin = int(board.rng.integers(0, k))
    n = int(board.rng.integers(1, k - begin + 1))
    room = MAX_ROWS * n
    slots = board.buffer(room * board.num_ranks, space=Space.HEAP) if pushed else None
    for rank in range(board.num_ranks):
        out = slots.at(rank, rank * room, (rank + 1) * room) if slots else board.padded(rank, n, MAX_ROWS)
        _embed(board, rank, num_rows, (k, begin, n), out, pushed)
    for rank in range(board.num_ranks) if slots else ():  # what was pushed is read before more may come
        sink = board.writable(board.padded(rank, slots.cols, 1))
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
    out_bf16 = None if pushed else board.writable(board.padded(rank, n, MAX_ROWS, dtype="bf16"), num_rows)
    norm = InputNorm(board, rank, n, MAX_ROWS, num_rows, out_bf16)
    what = f"embed {epilogue.name} k={k} columns {begin} to {begin + n} rows={num_rows}"
    board.graph.add(
        Embed(
            rank,
            what,
            table=board.table(rank, table),
            out=out,
            out_bf16=out_bf16,
            batch=board.filled(rank, batch, "u8", space=Space.HEAP),
            col_begin=begin,
            num_cols=n,
            first_token=FIRST_TOKEN,
            epilogue=epilogue,
            num_ranks=board.num_ranks,
            **norm.operands,
        )
    )
    for target in range(board.num_ranks) if pushed else (rank,):
        # A block is [rows, n] without gaps, whatever room there is.
        region = Region(out.buffer, target, out.begin, out.begin + (num_rows * n if pushed else n))
        board.writable(region, 1 if pushed else num_rows)

        def check(memory: Memory, region: Region = region) -> None:
            assert_close("", f32(memory, region, 1 if pushed else num_rows).reshape(num_rows, n), want, 0)
            norm.check(memory, want.numpy())

        board.expect(target, f"embed {epilogue.name}", f"{what} by rank {rank}", check, of=rank)


def put(board: Board, rank: int, to: int) -> None:
    """Any number of bytes, to an address that is a multiple of 4 and perhaps of no more."""
    num, begin = int(board.rng.integers(1, 5000)), 4 * int(board.rng.integers(0, 5))
    raw = board.rng.integers(0, 256, num, dtype=np.uint8)
    space = board.space() if to == rank else Space.HEAP
    out = board.writable(board.buffer(begin + num, dtype="u8", space=space).at(to, begin))
    board.graph.add(Put(rank, f"put of {num} bytes", src=board.filled(rank, raw, "u8"), dst=out))

    def check(memory: Memory) -> None:
        assert_close("", memory[out.buffer][0, begin:], raw, 0)

    board.expect(to, "put", f"put of {num} bytes from rank {rank} to byte {begin}", check, of=rank)


def put_rows(board: Board, rank: int, to: int, num_rows: int) -> None:
    """The rows of the batch of a buffer, and no others."""
    n = int(board.rng.integers(1, 200))
    batch, _ = batch_of(board, rank, num_rows)
    src, dst = (board.buffer(n, MAX_ROWS, space=Space.HEAP).at(where) for where in (rank, to))
    data, what = torch.randn(num_rows, n), f"put of {num_rows} rows of {n} from rank {rank}"
    board.fill(src, data)
    board.writable(dst, num_rows)
    board.graph.add(Put(rank, what, src=src, dst=dst, batch=batch))
    board.expect(to, "put", what, lambda memory: assert_close("", f32(memory, dst, num_rows), data, 0), of=rank)


def affine(board: Board, rank: int) -> None:
    """Numbers put to the next rank, where they are scaled."""
    to, num = (rank + 1) % board.num_ranks, int(board.rng.integers(1, 3000))
    data = torch.randn(1, num)
    scale, shift = (float(np.float32(board.rng.normal())) for _ in range(2))
    got, scaled = (board.writable(board.padded(to, num, 1, space)) for space in (Space.HEAP, None))
    board.graph.add(Put(rank, "put", src=board.fill(board.padded(rank, num, 1), data), dst=got))
    board.graph.add(Affine(to, "affine", src=got, dst=scaled, scale=scale, shift=shift))

    def check(memory: Memory) -> None:
        assert_close("put ", f32(memory, got), data, 0)
        want = data.double() * scale + shift
        assert_close("affine ", f32(memory, scaled), want, 1e-6 + 1e-6 * want.abs())

    board.expect(to, "affine", f"put and affine of {num}", check)


def sines(board: Board, rank: int) -> None:
    """Sines of sines."""
    num, times = int(board.rng.integers(1, 3000)), int(board.rng.integers(0, 40))
    data = torch.randn(1, num)
    out, what = board.writable(board.padded(rank, num, 1)), f"sine of {num}, {times} times"
    board.graph.add(Sine(rank, what, src=board.fill(board.padded(rank, num, 1), data), dst=out, times=times))

    def check(memory: Memory) -> None:
        want = data.double()
        for _ in range(times):
            want = want.sin()
        assert_close("", f32(memory, out), want, 1e-6)

    board.expect(rank, "sine", what, check)


def sum_of_blocks(board: Board, rank: int, n: int, num_rows: int, add: bool) -> None:
    """Several blocks of n columns at equal distances with room between them, or columns of every row."""
    batch, _ = batch_of(board, rank, num_rows)
    rows, room, num_blocks = num_rows or 1, MAX_ROWS if num_rows else 1, int(board.rng.integers(1, 7))
    data, old = torch.randn(num_blocks, rows, n), torch.randn(rows, n)
    if board.rng.integers(2):
        stride = n * room + int(board.rng.integers(0, 5))
        source = board.buffer(num_blocks * stride)
        blocks = tuple(source.at(rank, b * stride, b * stride + n * room) for b in range(num_blocks))
        for block, values in zip(blocks, data, strict=True):
            board.fill(block._replace(end=block.begin + rows * n), values)
    else:
        stride = n + int(board.rng.integers(0, 5))
        source = board.buffer(num_blocks * stride, room)
        blocks = tuple(source.at(rank, b * stride, b * stride + n) for b in range(num_blocks))
        for block, values in zip(blocks, data, strict=True):
            board.fill(block, values)
    dst = board.writable(board.padded(rank, n, room), rows)
    if add:
        board.fill(dst, old)
    out_bf16 = None
    if board.rng.integers(2):
        out_bf16 = board.writable(board.padded(rank, n, room, dtype="bf16"), rows)
    norm = InputNorm(board, rank, n, room, rows, out_bf16)
    what = f"sum of {num_blocks} blocks of {n} rows={num_rows or 'one'} add={add}"
    board.graph.add(
        Sum(rank, what, blocks=blocks, dst=dst, out_bf16=out_bf16, batch=batch, accumulates=add, **norm.operands)
    )

    def check(memory: Memory) -> None:
        total = old.clone() if add else torch.zeros_like(old)
        for block in data:
            total += block
        # Bit for bit: float32 additions in the order of the blocks.
        assert_close("", f32(memory, dst, rows), total, 0)
        norm.check(memory, total.numpy())

    board.expect(rank, "sum", what, check)


def post_norm(board: Board, rank: int, k: int, num_rows: int) -> None:
    """Some columns of y, over the rms of its whole rows and times a weight, added to x."""
    batch, _ = batch_of(board, rank, num_rows)
    rows, room, begin = num_rows or 1, MAX_ROWS if num_rows else 1, int(board.rng.integers(k))
    n, eps = int(board.rng.integers(1, k - begin + 1)), 1e-5
    data, old, weight = 3 * torch.randn(rows, k), torch.randn(rows, n), torch.randn(n)
    y, x = board.padded(rank, k, room), board.writable(board.padded(rank, n, room), rows)
    out_bf16 = None
    if board.rng.integers(2):
        out_bf16 = board.writable(board.padded(rank, n, room, dtype="bf16"), rows)
    norm = InputNorm(board, rank, n, room, rows, out_bf16)
    what = f"post_norm of columns {begin} to {begin + n} of {k} rows={num_rows or 'one'}"
    board.graph.add(
        PostNorm(
            rank,
            what,
            y=board.fill(y, data),
            weight=board.vector(rank, weight),
            x=board.fill(x, old),
            out_bf16=out_bf16,
            batch=batch,
            col_begin=begin,
            eps=eps,
            **norm.operands,
        )
    )
    added = (reference.over_rms(data, eps) * torch.nn.functional.pad(weight, (begin, k - begin - n)))[
        :, begin : begin + n
    ]

    def check(memory: Memory) -> None:
        got = f32(memory, x, rows)
        assert_close("", got, old + added, 4e-6 * added.abs() + 1e-6 * old.abs() + 1e-6)
        norm.check(memory, got)

    board.expect(rank, "post_norm", what, check)


def sample(board: Board, rank: int, num_tasks: int) -> None:
    """The best candidate of every sampled row, to rank 0, perhaps from the same place on this rank."""
    _sample(board, rank, num_tasks, decode_batch(int(board.rng.integers(1, 17)), board.rng), MAX_ROWS)


def sample_jobs(board: Board, rank: int, num_tasks: int) -> None:
    """The same of a job iteration, all of whose rows in the batch are sampled."""
    batch, num_rows = Batch(num_job_rows=MAX_BUCKET_ROWS), int(board.rng.integers(MAX_ROWS, MAX_SEQUENCES + 1))
    batch.num_rows = int(board.rng.integers(1, num_rows + 1))
    _sample(board, rank, num_tasks, batch, num_rows)


def _sample(board: Board, rank: int, num_tasks: int, batch: Batch, num_rows: int) -> None:
    candidates = np.zeros((num_tasks, num_rows), dtype=CANDIDATE)
    # Few different values, so that ties are common; some tasks have nothing for a row.
    candidates["value"] = board.rng.integers(-3, 3, candidates.shape)
    candidates["token"] = np.arange(num_tasks)[:, None] * 100 + board.rng.integers(0, 100, candidates.shape)
    candidates["token"][board.rng.random(candidates.shape) < 0.2] = -1
    slab_rows = range(0 if batch.num_job_rows else batch.num_rows)
    unsampled = {row for row in slab_rows if not batch.rows[row].sample}
    if board.gpu_layout:  # the GPU's body relies on the head's tasks, which leave no candidate for rows not sampled
        candidates["token"][:, list(unsampled)] = -1
    out = board.buffer(candidates_bytes(num_rows), dtype="u8", space=Space.HEAP).at(0)
    what = f"sample of {batch.num_rows} of {num_rows} rows, {num_tasks} tasks on rank {rank}"
    given = board.filled(rank, candidates, "u8")
    rows = board.filled(rank, batch, "u8", space=Space.HEAP)
    board.graph.add(Sample(rank, what, candidates=given, out=out, batch=rows, num_rows=num_rows))

    def check(memory: Memory) -> None:
        got = memory[out.buffer].reshape(-1).view(CANDIDATE)
        for row in range(batch.num_rows):
            valid = candidates[:, row][candidates[:, row]["token"] >= 0]
            if row in unsampled or not len(valid):
                assert got[row]["token"] == -1, f"row {row}: {got[row]} from nothing"
                continue
            best = valid["value"].max()
            want = (best, valid["token"][valid["value"] == best].min())
            assert got[row].item() == want, f"row {row}: {got[row]}, expected {want}"

    for where in {0, rank}:
        board.writable(out.on(where))
    board.expect(0, "sample", what, check, of=rank)
    if rank and not board.gpu_layout:  # the host twin always sends from its own place; a GPU only over the network
        board.expect(rank, "sample", f"{what}, at its own place", check)
