"""The host twin's linear tasks, one at a time, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import reference
from support.arena import Arena
from support.arrays import ROUNDING, assert_close
from support.batches import decode_batch
from support.body_memory import CANDIDATE, RoundedOutput, any_space, rows_of

from distmk.abi import MAX_ROWS, Batch, Epilogue, Space, Trigger
from distmk.graph.regions import ITEM_BYTES
from distmk.tasks import Linear


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
        out_bf16 = RoundedOutput(arena, case.args, case.rows, n) if dtype == "f32" and rng.random() < 0.5 else None
        arena.run(Linear, case.args)
        got = arena.floats(out, (case.rows, stride), dtype)[:, :n]
        assert_close(f"{epilogue.name} k={k} n={n} rows={num_rows} ", got, want, tolerance)
        if out_bf16:
            out_bf16.check(got.copy())


def test_linear_rounds_what_will_be_multiplied(rng: np.random.Generator) -> None:
    """Bit for bit: zeros times the identity, added to numbers that are hard to round."""
    arena = Arena(rng)
    old = reference.hard_to_round(16, 50)
    args = Linear.Args(k=50, n=50, x_stride=50, out_stride=50, epilogue=int(Epilogue.ADD))
    args.x, args.weight = arena.store(torch.zeros(16, 50).bfloat16()), arena.store(torch.eye(50).bfloat16())
    args.out, args.batch = arena.store(old), arena.store(decode_batch(16, rng))
    out_bf16 = RoundedOutput(arena, args, 16, 50)
    arena.output(args.out, 4 * 50 * 16)
    arena.run(Linear, args)
    out_bf16.check(old)


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
