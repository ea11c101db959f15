"""Cases of attention whose batch-1 row is combined by the tasks that multiply it, and rows of larger batches by a combine."""

from __future__ import annotations

import numpy as np
import torch
from support.bodies.attention import Caches, allowed_error, declare_fused_partials, declare_partials, operands
from support.bodies.attention_inputs import PLAIN, AttentionInputs, Heads
from support.bodies.board import Board, f32
from support.reference import Scoring

from distmk.abi import FUSED_PARTIAL_HEADER, MAX_ROWS, LaunchKind
from distmk.tasks import Attention, Combine, Linear
from distmk.tasks.attention import attention_type
from distmk.testing.arrays import ROUNDING, assert_close
from distmk.testing.memory import Memory

NUM_PICKED = 61  # elements of attention's output that the product picks


def fused_combine(
    board: Board,
    rank: int,
    error: float,
    heads: Heads,
    head_dim: int,
    batch_1: bool,
    max_len: int,
    how: Scoring = PLAIN,
) -> None:
    """The product's weights are rows of the identity: its output is compared with what is in memory, as combined from that."""
    inputs = AttentionInputs(board.rng, heads, head_dim, 16, True, max_len, batch_1, fused_partials=True, how=how)
    error = allowed_error(inputs, error)
    kind = attention_type(inputs.shape)
    s, k, rows = inputs.shape, heads.num_q * head_dim, inputs.batch.num_rows
    launch = LaunchKind.SPREAD if board.rng.random() < 0.8 else LaunchKind.MASSIVE
    what = f"{'batch-1 ' * batch_1}attention with fused combine {s} {inputs.runs}"
    read, caches = operands(board, rank, inputs), Caches(board, rank, inputs)
    fused, reset = (board.buffer(s.fused_partial_cols, dtype="bf16").at(rank) for _ in range(2))
    partials, x = board.buffer(s.num_partials).at(rank), board.buffer(k, MAX_ROWS, "bf16").at(rank)
    board.graph.add(
        kind(
            rank,
            what,
            launch=launch,
            k_cache=caches.k,
            v_cache=caches.v,
            partials=partials,
            fused_partials=fused,
            lamport_reset=reset,
            long_splits=launch is LaunchKind.SPREAD and kind is Attention and bool(board.rng.integers(2)),
            **read,
        )
    )
    batch, slices = read["batch"], (0, s.num_q * s.slices)
    op = f"combine of {what}"
    board.graph.add(Combine(rank, op, shape=s, slices=slices, partials=partials, out=x, batch=batch, skips_fused=True))
    picked = board.rng.integers(0, k, NUM_PICKED)
    weight = torch.zeros(NUM_PICKED, k).index_put_((torch.arange(NUM_PICKED), torch.from_numpy(picked)), torch.ones(()))
    out, slab = board.writable(board.buffer(NUM_PICKED, MAX_ROWS).at(rank), rows), board.matrix(rank, weight.bfloat16())
    board.graph.add(
        Linear(rank, f"product of {what}", x=x, slab=slab, out=out, batch=batch, fused_partials=fused, shape=s)
    )
    board.writable(reset)
    if inputs.fuses_combine:
        declare_fused_partials(board, inputs, fused)
    else:
        declare_partials(board, inputs, partials)
        board.writable(x, rows)

    def check(memory: Memory) -> None:
        after = caches.read(memory)
        inputs.check_caches(after)
        left = memory[reset.buffer].view(np.uint16).reshape(s.num_q, -1, FUSED_PARTIAL_HEADER + head_dim)
        assert_close("reset ", left[..., FUSED_PARTIAL_HEADER:], np.zeros_like(left[..., FUSED_PARTIAL_HEADER:]), 0)
        assert_close("reset weights ", left[..., :2], np.zeros_like(left[..., :2]), 0)
        got = f32(memory, out, rows)
        if inputs.fuses_combine:
            parts = memory[fused.buffer].reshape(-1).view(np.uint16)
            inputs.check_fused_partials(parts, after, error)
            want = inputs.combined(parts)[None, picked]
            assert_close("combined ", got, want, ROUNDING["bf16"] * np.abs(want) + 1e-6)
        else:
            inputs.check_combined(f32(memory, x, MAX_ROWS), after, error)
            assert_close("picked ", got, f32(memory, x, rows)[:, picked], 0)

    board.expect(rank, "fused combine", what, check)
