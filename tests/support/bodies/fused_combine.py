"""Attention whose single row is merged by the tasks that multiply it, and that of several rows by a merge in between."""

from __future__ import annotations

import numpy as np
import torch
from support.arrays import ROUNDING, assert_close
from support.attention_inputs import AttentionInputs, Heads
from support.bodies.board import Board, Memory, f32

from distmk.abi import FUSED_PARTIAL_HEADER, MAX_ROWS, LaunchKind, Space
from distmk.graph.regions import Region
from distmk.tasks import Attention, Combine, Linear

NUM_PICKED = 61


def fused_partials(
    board: Board, rank: int, error: float, heads: Heads, head_dim: int, alone: bool, max_len: int
) -> None:
    """The product picks elements of attention's output, of what lies in memory as exactly as they are merged from it."""
    inputs = AttentionInputs(board.rng, heads, head_dim, 16, True, max_len, alone, fused_partials=True)
    s, k = inputs.shape, heads.num_q * head_dim
    launch = LaunchKind.SPREAD if board.rng.random() < 0.8 else LaunchKind.MASSIVE
    what = f"lone {'row' if alone else 'rows'} of attention {s} {inputs.runs}"
    kept = inputs.kept(inputs.caches, board.tiled)
    caches = [board.give_all(rank, cache, "bf16", space=Space.LOCAL) for cache in kept]
    batch = board.give_all(rank, inputs.batch, "u8", space=Space.HEAP)
    places = [board.buffer(s.fused_partial_cols, dtype="bf16").at(rank) for _ in range(2)]
    part, x = board.buffer(s.num_partials).at(rank), board.buffer(k, MAX_ROWS, "bf16").at(rank)
    qkv = board.give(board.buffer(inputs.qkv.shape[1], MAX_ROWS).at(rank), inputs.qkv)
    q_norm, k_norm = (board.vector(rank, norm) for norm in inputs.norms or (None, None))
    board.graph.add(
        Attention(
            rank,
            what,
            launch=launch,
            shape=s,
            qkv=qkv.buffer.at(rank, 0, s.qkv_cols),
            k_cache=caches[0],
            v_cache=caches[1],
            page_table=board.give_all(rank, inputs.pages, "i32", space=Space.HEAP),
            partials=part,
            fused_partials=places[0],
            reset=places[1],
            batch=batch,
            rope=board.graph.constant(board.name("rope"), rank, inputs.rope.numpy()),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-6,
            long_splits=launch is LaunchKind.SPREAD and bool(board.rng.integers(2)),
        )
    )
    slices = (0, s.num_q * s.slices)
    merge = Combine(
        rank, f"merge of {what}", shape=s, slices=slices, partials=part, out=x, batch=batch, skips_fused=True
    )
    board.graph.add(merge)
    picked = board.rng.integers(0, k, NUM_PICKED)
    weight = torch.zeros(NUM_PICKED, k).index_put_((torch.arange(NUM_PICKED), torch.from_numpy(picked)), torch.ones(()))
    out, rows = board.buffer(NUM_PICKED, MAX_ROWS).at(rank), inputs.batch.num_rows
    slab = board.matrix(rank, weight.bfloat16())
    board.graph.add(
        Linear(rank, f"product of {what}", x=x, slab=slab, out=out, batch=batch, fused_partials=places[0], shape=s)
    )
    for written in (*caches, part, places[1]):
        board.written(written)
    board.written(out, rows)
    if inputs.has_lone_row:
        _declare(board, inputs, places[0].buffer.at(rank))
    else:
        board.written(x, rows)

    def check(memory: Memory) -> None:
        raw = np.stack([memory[cache.buffer].reshape(-1) for cache in caches])
        held = inputs.kept(torch.from_numpy(raw).view(torch.bfloat16).view(inputs.caches.shape), board.tiled)
        inputs.check_caches(held)
        reset = memory[places[1].buffer].view(np.uint16).reshape(s.num_q, -1, FUSED_PARTIAL_HEADER + head_dim)
        assert_close("cleared ", reset[..., FUSED_PARTIAL_HEADER:], np.zeros_like(reset[..., FUSED_PARTIAL_HEADER:]), 0)
        assert_close("cleared weights ", reset[..., :2], np.zeros_like(reset[..., :2]), 0)
        got = f32(memory, out, rows)
        if inputs.has_lone_row:
            left = memory[places[0].buffer].reshape(-1).view(np.uint16)
            inputs.check_lone(left, held, error)
            want = inputs.merged_lone(left)[None, picked]
            assert_close("merged ", got, want, ROUNDING["bf16"] * np.abs(want) + 1e-6)
        else:
            inputs.check_merged(f32(memory, x, MAX_ROWS), held, error)
            assert_close("picked ", got, f32(memory, x, rows)[:, picked], 0)

    board.check(rank, what, check)


def _declare(board: Board, inputs: AttentionInputs, fused_partials: Region) -> None:
    """What a single row's splits may write; of a header no more than its first word is anybody's."""
    s, size = inputs.shape, FUSED_PARTIAL_HEADER + inputs.head_dim
    for head in range(s.num_q):
        for split in range(inputs.splits(0)):
            begin = head * (s.fused_partial_cols // s.num_q) + split * size
            board.written(fused_partials.buffer.at(fused_partials.rank, begin, begin + size))
