"""Every task body of the host twin, one task at a time, against torch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.arena import Arena
from support.arrays import assert_close
from support.batches import decode_batch, make_batch
from support.body_memory import CANDIDATE, RoundedOutput, any_space, rows_of

from distmk.abi import MAX_ROWS, Batch, BatcherState, Candidate, Epilogue, LaunchParams, Request, Space, Trigger
from distmk.tasks import Affine, Embed, Nop, Put, Sample, SchedulerStep, Sine, Sum


def test_nop_fires_its_triggers_and_writes_nothing(rng: np.random.Generator) -> None:
    arena = Arena(rng, num_ranks=2, rank=1)
    arena.run(Nop, Nop.Args(0), [Trigger(1, 0, 3, 0), Trigger(2, 1, 1, 0)])
    assert arena.events(0) == [0, 3, 0, 0] and arena.events(1) == [0, 0, 1, 0]


@pytest.mark.parametrize("dst_rank", [0, 1, 2])
def test_put(rng: np.random.Generator, dst_rank: int) -> None:
    arena = Arena(rng, num_ranks=3, rank=1)
    size = int(rng.integers(1, 5000))
    data = rng.integers(0, 256, size, dtype=np.uint8)
    src, dst = arena.store(data, any_space(rng)), arena.alloc(size, Space.HEAP)
    arena.output(dst, size, dst_rank)
    arena.run(Put, Put.Args(src, dst, size, dst_rank), [Trigger(0, dst_rank, 2, 0), Trigger(3, 1, 1, 0)])
    assert_close("put", arena.bytes_at(dst, size, dst_rank), data, 0)
    want = [[0] * 4 for _ in range(3)]
    want[dst_rank][0] += 2
    want[1][3] += 1
    assert [arena.events(rank) for rank in range(3)] == want


def test_affine(rng: np.random.Generator) -> None:
    arena = Arena(rng)
    num = int(rng.integers(1, 1000))
    x = rng.standard_normal(num).astype(np.float32)
    src, dst = arena.store(x), arena.alloc(4 * num)
    arena.output(dst, 4 * num)
    arena.run(Affine, Affine.Args(src, dst, num, 1.5, -0.25))
    assert_close("affine", arena.f32(dst, (num,)), x.astype(np.float64) * 1.5 - 0.25, 1e-6)


def test_sine(rng: np.random.Generator) -> None:
    arena = Arena(rng)
    num, times = int(rng.integers(1, 3000)), int(rng.integers(0, 40))
    x = rng.standard_normal(num).astype(np.float32)
    src, dst = arena.store(x), arena.alloc(4 * num)
    arena.output(dst, 4 * num)
    arena.run(Sine, Sine.Args(src, dst, num, times))
    want = x.astype(np.float64)
    for _ in range(times):
        want = np.sin(want)
    assert_close(f"{times} sines", arena.f32(dst, (num,)), want, 1e-6)


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("num", [1, 7, 64, 100])
@pytest.mark.parametrize("num_rows", [None, 1, 5, 16])
def test_sum_in_block_order(rng: np.random.Generator, num: int, num_rows: int | None, add: int) -> None:
    arena = Arena(rng)
    rows, num_blocks, dst_stride = num_rows or 1, int(rng.integers(1, 7)), num + int(rng.integers(0, 9))
    block_floats = num * MAX_ROWS + int(rng.integers(0, 5))
    blocks = torch.full((num_blocks, block_floats), torch.nan)
    blocks[:, : rows * num] = torch.randn(num_blocks, rows * num)
    old = torch.randn(rows, num)
    dst = rows_of(arena, old if add else torch.full((rows, num), torch.nan), dst_stride)
    args = Sum.Args(block_stride=4 * block_floats, num_blocks=num_blocks, num=num, dst_stride=dst_stride, add=add)
    args.blocks, args.dst = arena.store(blocks, Space.HEAP), dst
    out_bf16 = RoundedOutput(arena, args, rows, num) if rng.random() < 0.5 else None
    if num_rows:
        args.batch = arena.store(decode_batch(rows, rng))
    arena.output(dst, 4 * num, rows=rows, stride=4 * dst_stride)
    arena.run(Sum, args)
    total = old.clone() if add else torch.zeros(rows, num)
    for block in blocks:
        total += block[: rows * num].reshape(rows, num)
    # Bit for bit: float32 additions in the order of the blocks.
    assert_close("sum", arena.f32(dst, (rows, dst_stride))[:, :num], total, 0)
    if out_bf16:
        out_bf16.check(total)


@pytest.mark.parametrize("push", [False, True])
def test_embed(rng: np.random.Generator, push: bool) -> None:
    for num_rows in (1, 5, 16):
        arena = Arena(rng, num_ranks=2, rank=1)
        k, first, last = int(rng.integers(8, 300)), 300, 700
        begin = int(rng.integers(0, k))
        n = int(rng.integers(1, k - begin + 1))
        table = torch.randn(last - first, k).bfloat16()
        batch = decode_batch(num_rows, rng)
        for row, token in zip(range(num_rows), rng.permutation([first - 1, first, last - 1, last]), strict=False):
            batch.rows[row].token = int(token)
        stride = n if push else n + 3
        out = arena.alloc(4 * stride * MAX_ROWS, Space.HEAP)
        args = Embed.Args(k=k, col_begin=begin, n=n, out_stride=stride, first_token=first, last_token=last)
        args.table, args.out, args.batch = arena.store(table), out, arena.store(batch)
        args.epilogue = int(Epilogue.PUSH if push else Epilogue.STORE)
        out_bf16 = None if push else RoundedOutput(arena, args, num_rows, n)
        for rank in (0, 1) if push else (1,):
            arena.output(out, 4 * n, rank, num_rows, 4 * stride)
        arena.run(Embed, args, [Trigger(0, 0, 1, 0), Trigger(0, 1, 1, 0)])
        tokens = [batch.rows[r].token for r in range(num_rows)]
        want = [table[t - first, begin : begin + n].float() if first <= t < last else torch.zeros(n) for t in tokens]
        for rank in (0, 1) if push else (1,):
            assert_close(f"rank {rank} ", arena.f32(out, (num_rows, stride), rank)[:, :n], torch.stack(want), 0)
        if out_bf16:
            out_bf16.check(torch.stack(want))
        assert arena.events(0) == arena.events(1) == [1, 0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_sample(rng: np.random.Generator, rank: int) -> None:
    arena = Arena(rng, num_ranks=2, rank=rank)
    num_tasks, batch = int(rng.integers(1, 9)), decode_batch(int(rng.integers(1, 17)), rng)
    candidates = np.zeros((num_tasks, MAX_ROWS), dtype=CANDIDATE)
    # Few different values, so that ties are common; some tasks have nothing for a row.
    candidates["value"] = rng.integers(-3, 3, candidates.shape)
    candidates["token"] = np.arange(num_tasks)[:, None] * 100 + rng.integers(0, 100, candidates.shape)
    candidates["token"][rng.random(candidates.shape) < 0.2] = -1
    out = arena.alloc(8 * MAX_ROWS, Space.HEAP)
    args = Sample.Args(arena.store(candidates, Space.HEAP), out, arena.store(batch), num_tasks)
    for where in {0, rank}:
        arena.output(out, 8 * MAX_ROWS, where)
    arena.run(Sample, args, [Trigger(1, 0, 1, 0)])
    got = arena.bytes_at(out, 8 * MAX_ROWS, rank=0).view(CANDIDATE)
    assert_close("at its own place", arena.bytes_at(out, 8 * MAX_ROWS), arena.bytes_at(out, 8 * MAX_ROWS, 0), 0)
    for row in range(batch.num_rows):
        valid = candidates[:, row][candidates[:, row]["token"] >= 0]
        if not batch.rows[row].sample or not len(valid):
            assert got[row]["token"] == -1
            continue
        best = valid["value"].max()
        assert got[row].item() == (best, valid["token"][valid["value"] == best].min()), f"row {row} of {candidates}"
    assert arena.events(0) == [0, 1, 0, 0]


def test_prepare_lays_out_the_first_prompt_on_every_rank(rng: np.random.Generator) -> None:
    arena = Arena(rng, num_ranks=2)
    prompt = rng.integers(0, 1000, 20).astype(np.int32)
    requests = (Request * 1)(Request(0, 20, 5, 0))
    num_pages, max_pages = 8, 4
    batch, table = arena.alloc(ctypes.sizeof(Batch), Space.HEAP), arena.alloc(4 * MAX_ROWS * max_pages, Space.HEAP)
    state_bytes = ctypes.sizeof(BatcherState) + 4 * num_pages
    args = SchedulerStep.Args(arena.alloc(16 * MAX_ROWS, Space.HEAP), batch, table, arena.alloc(state_bytes), 2, 8)
    args.max_pages, args.num_pages, args.max_slots, args.max_positions = max_pages, num_pages, 4, 32
    for rank in (0, 1):
        arena.output(batch, ctypes.sizeof(Batch), rank)
        arena.output(table, 4 * MAX_ROWS * max_pages, rank)
    arena.output(args.state, state_bytes)
    params = LaunchParams(requests=ctypes.addressof(requests), prompts=prompt.ctypes.data, num_requests=1)
    arena.run(SchedulerStep, args, [Trigger(0, 0, 1, 0), Trigger(0, 1, 1, 0)], params=params)
    for rank in (0, 1):
        got = Batch.from_buffer_copy(arena.bytes_at(batch, ctypes.sizeof(Batch), rank).tobytes())
        assert [got.rows[r].token for r in range(got.num_rows)] == prompt[:16].tolist()
        assert (got.num_runs, got.runs[0].kv_len, got.stop, got.num_reset_rows) == (1, 16, 0, 16)
        pages = arena.bytes_at(table, 4 * MAX_ROWS * max_pages, rank).view(np.int32)[:4]
        assert len(set(pages.tolist())) == 4 and (pages >= 0).all() and (pages < num_pages).all()
        assert arena.events(rank) == [1, 0, 0, 0]


def test_candidate_layout() -> None:
    assert ctypes.sizeof(Candidate) == CANDIDATE.itemsize
    assert make_batch([], np.random.default_rng(0)).num_rows == 0
