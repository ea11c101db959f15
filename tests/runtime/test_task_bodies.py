"""Every task body of the host twin, one task at a time, against torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import reference
import torch
from arena import Arena
from arrays import ROUNDING, assert_close
from batches import decode_batch, make_batch

from distmk.abi import MAX_ROWS, Batch, BatcherState, Candidate, Epilogue, LaunchParams, Request, Space, Trigger
from distmk.regions import ITEM_BYTES
from distmk.tasks import Affine, Embed, Linear, Nop, Prepare, Put, Sample, Sine, Sum

CANDIDATE = np.dtype([("value", np.float32), ("token", np.int32)])


def any_space(rng: np.random.Generator) -> Space:
    return Space.HEAP if rng.random() < 0.5 else Space.LOCAL


def rows_of(arena: Arena, x: torch.Tensor, stride: int, space: Space = Space.HEAP) -> int:
    """Store the rows of x `stride` elements apart, with poison between them."""
    padded = torch.full((x.shape[0], stride), torch.nan, dtype=x.dtype)
    padded[:, : x.shape[1]] = x
    return arena.store(padded, space)


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
    rounded = RoundedOutput(arena, args, rows, num) if rng.random() < 0.5 else None
    if num_rows:
        args.batch = arena.store(decode_batch(rows, rng))
    arena.output(dst, 4 * num, rows=rows, stride=4 * dst_stride)
    arena.run(Sum, args)
    total = old.clone() if add else torch.zeros(rows, num)
    for block in blocks:
        total += block[: rows * num].reshape(rows, num)
    # Bit for bit: float32 additions in the order of the blocks.
    assert_close("sum", arena.f32(dst, (rows, dst_stride))[:, :num], total, 0)
    if rounded:
        rounded.check(total)


class RoundedOutput:
    """Room for the bf16 copy of a task's columns."""

    def __init__(self, arena: Arena, args: Any, rows: int, n: int) -> None:
        self.arena, self.at, self.rows, self.n, self.stride = arena, arena.alloc(2 * rows * (n + 3)), rows, n, n + 3
        args.rounded, args.rounded_stride = self.at, self.stride
        arena.output(self.at, 2 * n, rows=rows, stride=2 * self.stride)

    def check(self, want: np.ndarray | torch.Tensor) -> None:
        got = self.arena.floats(self.at, (self.rows, self.stride), "bf16")[:, : self.n]
        assert_close("rounded ", got, torch.as_tensor(want).float().bfloat16().float(), 0)


class LinearCase:
    """Inputs of a linear task, stored; `want` is the product in float64 and `tolerance` follows from its terms."""

    def __init__(
        self, arena: Arena, k: int, n: int, batch: Batch | None, normalized: bool, bias: bool, halves: int = 1
    ):
        rng = arena.rng
        self.rows = batch.num_rows if batch else 1
        self.x = torch.randn(self.rows, k).bfloat16()
        self.weight = torch.randn(n * halves, k).bfloat16()
        self.bias = torch.randn(n * halves) if bias else None
        x_stride = k + int(rng.integers(0, 7))
        inputs = (self.x, self.weight, self.bias, 1e-5 if normalized else None)
        self.want = reference.linear(*inputs)
        self.tolerance = 1e-6 * reference.linear_scale(*inputs) + 1e-6
        self.args = Linear.Args(k=k, n=n, x_stride=x_stride, eps=1e-5, normalized=normalized)
        self.args.x = rows_of(arena, self.x, x_stride, any_space(rng))
        self.args.weight = arena.store(self.weight, align=int(rng.choice([2, 6, 64])))
        self.args.bias = arena.store(self.bias) if bias else 0
        self.args.batch = arena.store(batch) if batch else 0


def batch_or_none(rng: np.random.Generator, num_rows: int) -> Batch | None:
    return decode_batch(num_rows, rng) if num_rows else None


@pytest.mark.parametrize("k", [1, 17, 63, 256, 576, 1000])
@pytest.mark.parametrize("n", [1, 3, 7, 29])
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.ADD, Epilogue.SWIGLU])
def test_linear_columns(rng: np.random.Generator, epilogue: Epilogue, n: int, k: int) -> None:
    for num_rows in (0, 1, *rng.integers(2, 17, 2).tolist(), 16):
        arena = Arena(rng)
        batch = batch_or_none(rng, num_rows)
        halves = 2 if epilogue is Epilogue.SWIGLU else 1
        case = LinearCase(arena, k, n, batch, rng.random() < 0.5, rng.random() < 0.5, halves)
        stride, old = n + int(rng.integers(0, 5)), torch.randn(case.rows, n)
        want, tolerance = case.want, case.tolerance
        if epilogue is Epilogue.ADD:
            want, tolerance = want + old, tolerance + 1e-6 * old.abs()
        elif epilogue is Epilogue.SWIGLU:
            # The derivative of silu stays within 1.1, so an error of either factor passes on in proportion.
            gate, up = want.chunk(2, -1)
            gate_error, up_error = tolerance.chunk(2, -1)
            tolerance = 1.1 * gate_error * up.abs() + gate.abs() * up_error + 1e-6 * (gate * up).abs() + 1e-6
            want = reference.swiglu(want)
            old, tolerance = old.bfloat16(), tolerance + ROUNDING["bf16"] * (want.abs() + tolerance)
        out = rows_of(arena, old if epilogue is Epilogue.ADD else torch.full_like(old, torch.nan), stride)
        case.args.out, case.args.out_stride, case.args.epilogue = out, stride, int(epilogue)
        dtype = "bf16" if epilogue is Epilogue.SWIGLU else "f32"
        arena.output(out, ITEM_BYTES[dtype] * n, rows=case.rows, stride=ITEM_BYTES[dtype] * stride)
        rounded = RoundedOutput(arena, case.args, case.rows, n) if dtype == "f32" and rng.random() < 0.5 else None
        arena.run(Linear, case.args)
        got = arena.floats(out, (case.rows, stride), dtype)[:, :n]
        assert_close(f"{epilogue.name} k={k} n={n} rows={num_rows} ", got, want, tolerance)
        if rounded:
            rounded.check(got.copy())


def test_linear_rounds_what_will_be_multiplied(rng: np.random.Generator) -> None:
    """Bit for bit: zeros times the identity, added to numbers that are hard to round."""
    arena = Arena(rng)
    old = reference.hard_to_round(16, 50)
    args = Linear.Args(k=50, n=50, x_stride=50, out_stride=50, epilogue=int(Epilogue.ADD))
    args.x, args.weight = arena.store(torch.zeros(16, 50).bfloat16()), arena.store(torch.eye(50).bfloat16())
    args.out, args.batch = arena.store(old), arena.store(decode_batch(16, rng))
    rounded = RoundedOutput(arena, args, 16, 50)
    arena.output(args.out, 4 * 50 * 16)
    arena.run(Linear, args)
    rounded.check(old)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_linear_push(rng: np.random.Generator, rank: int) -> None:
    arena = Arena(rng, num_ranks=3, rank=rank)
    k, n, num_rows = int(rng.integers(1, 700)), int(rng.integers(1, 40)), int(rng.integers(0, 17))
    case = LinearCase(arena, k, n, batch_or_none(rng, num_rows), True, True)
    out = arena.alloc(4 * n * MAX_ROWS, Space.HEAP)
    case.args.out, case.args.out_stride, case.args.epilogue = out, n, int(Epilogue.PUSH)
    for peer in range(3):
        arena.output(out, 4 * n * case.rows, peer)
    arena.run(Linear, case.args, [Trigger(2, peer, 1 + peer, 0) for peer in range(3)])
    own = arena.f32(out, (case.rows, n))
    assert_close("own block", own, case.want, case.tolerance)
    for peer in range(3):
        assert_close(f"block of rank {peer}", arena.f32(out, (case.rows, n), peer), own, 0)
        assert arena.events(peer) == [0, 0, 1 + peer, 0]


@pytest.mark.parametrize("logits", [False, True])
def test_linear_argmax(rng: np.random.Generator, logits: bool) -> None:
    for num_rows in (0, 1, 5, 16):
        arena = Arena(rng)
        k, n, first, stride = 96, int(rng.integers(1, 60)), int(rng.integers(0, 50000)), 64
        batch = batch_or_none(rng, num_rows)
        case = LinearCase(arena, k, n, batch, True, False)
        out, kept = arena.alloc(8 * MAX_ROWS), arena.alloc(4 * MAX_ROWS * stride) if logits else 0
        case.args.out, case.args.logits, case.args.logits_stride = out, kept, stride
        case.args.first_token, case.args.epilogue = first, int(Epilogue.ARGMAX)
        sampled = [r for r in range(case.rows) if batch is None or batch.rows[r].sample]
        arena.output(out, 8 * MAX_ROWS)
        for r in sampled if logits else ():
            arena.output(kept + 4 * r * stride, 4 * n)
        arena.run(Linear, case.args)
        got = arena.bytes_at(out, 8 * MAX_ROWS).view(CANDIDATE)
        assert [r for r in range(MAX_ROWS) if got[r]["token"] >= 0] == sampled
        for r in sampled:
            token = int(got[r]["token"]) - first
            assert 0 <= token < n
            assert_close(f"value of row {r}", got[r]["value"], case.want[r, token], case.tolerance[r, token])
            assert case.want[r].max() <= case.want[r, token] + 2 * case.tolerance[r, token]
            if logits:
                assert_close(
                    f"logits[{r}]", arena.f32(kept, (MAX_ROWS, stride))[r, :n], case.want[r], case.tolerance[r]
                )


def test_linear_argmax_takes_the_lowest_id_of_equal_logits(rng: np.random.Generator) -> None:
    arena = Arena(rng)
    weight = torch.ones(20, 32).bfloat16()
    weight[:6] = -1
    args = Linear.Args(k=32, n=20, x_stride=32, first_token=100, epilogue=int(Epilogue.ARGMAX))
    args.x, args.weight, args.out = (
        arena.store(torch.ones(1, 32).bfloat16()),
        arena.store(weight),
        arena.alloc(8 * MAX_ROWS),
    )
    arena.output(args.out, 8 * MAX_ROWS)
    arena.run(Linear, args)
    assert arena.bytes_at(args.out, 8 * MAX_ROWS).view(CANDIDATE)[0].item() == (32.0, 106)


def test_linear_of_a_row_does_not_depend_on_the_others(rng: np.random.Generator) -> None:
    """A sequence must not get other tokens because of who shares its batch: equal bits for any number of rows."""
    k, n = int(rng.integers(300, 1200)), int(rng.integers(9, 60))
    x, weight = torch.randn(MAX_ROWS, k).bfloat16(), torch.randn(n, k).bfloat16()
    results = []
    for num_rows in range(1, MAX_ROWS + 1):
        arena = Arena(rng)
        args = Linear.Args(k=k, n=n, x_stride=k, out_stride=n)
        args.x, args.weight, args.out = arena.store(x[:num_rows]), arena.store(weight), arena.alloc(4 * n * MAX_ROWS)
        args.batch = arena.store(decode_batch(num_rows, rng))
        arena.output(args.out, 4 * n * num_rows)
        arena.run(Linear, args)
        results.append(arena.f32(args.out, (num_rows, n)).copy())
    for num_rows, result in enumerate(results, 1):
        assert_close(f"{num_rows} rows ", result, results[-1][:num_rows], 0)


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
        rounded = None if push else RoundedOutput(arena, args, num_rows, n)
        for rank in (0, 1) if push else (1,):
            arena.output(out, 4 * n, rank, num_rows, 4 * stride)
        arena.run(Embed, args, [Trigger(0, 0, 1, 0), Trigger(0, 1, 1, 0)])
        tokens = [batch.rows[r].token for r in range(num_rows)]
        want = [table[t - first, begin : begin + n].float() if first <= t < last else torch.zeros(n) for t in tokens]
        for rank in (0, 1) if push else (1,):
            assert_close(f"rank {rank} ", arena.f32(out, (num_rows, stride), rank)[:, :n], torch.stack(want), 0)
        if rounded:
            rounded.check(torch.stack(want))
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
    args = Prepare.Args(arena.alloc(16 * MAX_ROWS, Space.HEAP), batch, table, arena.alloc(state_bytes), 2, 8)
    args.max_pages, args.num_pages, args.max_rows, args.max_slots, args.max_positions = max_pages, num_pages, 16, 4, 32
    for rank in (0, 1):
        arena.output(batch, ctypes.sizeof(Batch), rank)
        arena.output(table, 4 * MAX_ROWS * max_pages, rank)
    arena.output(args.state, state_bytes)
    params = LaunchParams(requests=ctypes.addressof(requests), prompts=prompt.ctypes.data, num_requests=1)
    arena.run(Prepare, args, [Trigger(0, 0, 1, 0), Trigger(0, 1, 1, 0)], params=params)
    for rank in (0, 1):
        got = Batch.from_buffer_copy(arena.bytes_at(batch, ctypes.sizeof(Batch), rank).tobytes())
        assert [got.rows[r].token for r in range(got.num_rows)] == prompt[:16].tolist()
        assert (got.num_runs, got.runs[0].kv_len, got.stop, got.num_samples) == (1, 16, 0, 0)
        pages = arena.bytes_at(table, 4 * MAX_ROWS * max_pages, rank).view(np.int32)[:4]
        assert len(set(pages.tolist())) == 4 and (pages >= 0).all() and (pages < num_pages).all()
        assert arena.events(rank) == [1, 0, 0, 0]


def test_candidate_layout() -> None:
    assert ctypes.sizeof(Candidate) == CANDIDATE.itemsize
    assert make_batch([], np.random.default_rng(0)).num_rows == 0
