"""Attention handed out as a massive launch or spread over all workers, and up to three merges behind it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from support.arrays import assert_close
from support.attention_inputs import AttentionInputs, Heads
from support.bodies.board import Board, Memory, f32

from distmk.abi import MAX_ROWS, PARTIAL_FLOATS, LaunchKind, Space
from distmk.graph.regions import Region
from distmk.tasks import Attention, Combine


def attention(
    board: Board, rank: int, error: float, heads: Heads, head_dim: int, page_size: int, norms: bool, max_len: int
) -> None:
    inputs = AttentionInputs(board.rng, heads, head_dim, page_size, norms, max_len)
    inputs.values_without(int(board.rng.integers(head_dim)))
    s = inputs.shape
    launch = LaunchKind.SPREAD if board.rng.random() < 0.5 else LaunchKind.MASSIVE
    in_ring = launch is LaunchKind.SPREAD and board.rng.random() < 0.8
    what = f"{launch.name} attention {'through the ring ' * in_ring}{s} {inputs.runs}"
    qkv = board.buffer(inputs.qkv.shape[1], MAX_ROWS).at(rank)
    kept = inputs.kept(inputs.caches, board.tiled)
    caches = [board.give_all(rank, cache, "bf16", space=Space.LOCAL) for cache in kept]
    part = board.buffer(s.num_partials, lamport=bool(board.rng.integers(2))).at(rank)
    batch = board.give_all(rank, inputs.batch, "u8", space=Space.HEAP)
    q_norm, k_norm = (board.vector(rank, norm) for norm in inputs.norms or (None, None))
    board.graph.add(
        Attention(
            rank,
            what,
            launch=launch,
            shape=s,
            qkv=board.give(qkv, inputs.qkv).buffer.at(rank, 0, s.qkv_cols),
            k_cache=caches[0],
            v_cache=caches[1],
            page_table=board.give_all(rank, inputs.pages, "i32", space=Space.HEAP),
            partials=part,
            batch=batch,
            rope=board.graph.constant(board.name("rope"), rank, inputs.rope.numpy()),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-6,
            long_splits=in_ring,
        )
    )
    _declare(board, inputs, part, caches)
    out, total = board.wide(rank, s.num_q * head_dim, MAX_ROWS, dtype="bf16"), s.num_q * s.slices
    cuts = sorted(int(cut) for cut in board.rng.integers(0, total, 2))
    board.written(out, rows := inputs.batch.num_rows)
    left = board.buffer(out.buffer.cols, MAX_ROWS, "bf16").at(rank, out.begin, out.end)
    board.give(left, torch.ones(rows, out.cols).bfloat16())
    board.written(left, rows)
    for begin, end in pairwise((0, *cuts, total)):
        if begin < end:
            parts = part.buffer.at(rank, begin * s.partial_cols, end * s.partial_cols)
            columns, reset = (
                each.buffer.at(rank, each.begin + s.slice_begin(begin), each.begin + s.slice_begin(end))
                for each in (out, left)
            )
            op = f"merge of {what}, slices {begin} to {end}"
            task = Combine(
                rank,
                op,
                shape=s,
                slices=(begin, end),
                partials=parts,
                out=columns,
                reset=reset,
                batch=batch,
                polls=part.buffer.lamport,
            )
            board.graph.add(task)

    def check(memory: Memory) -> None:
        raw = np.stack([memory[cache.buffer].reshape(-1) for cache in caches])
        held = inputs.kept(torch.from_numpy(raw).view(torch.bfloat16).view(inputs.caches.shape), board.tiled)
        inputs.check_caches(held)
        parts = memory[part.buffer].reshape(-1).view(np.float32)
        if part.buffer.lamport:
            assert_close("cleared part ", parts, np.zeros_like(parts), 0)
        else:
            inputs.check_parts(parts, held, error)
        inputs.check_merged(f32(memory, out, MAX_ROWS), held, error)
        assert_close("cleared ", f32(memory, left, rows), np.zeros((rows, left.cols)), 0)
        if board.tiled:  # on a GPU, where rows are taken as they arrive
            bits = memory[out.buffer][:rows].view(np.uint16)[:, out.begin : out.end]
            assert_close("zeros that say that they are there ", bits == 0, np.zeros_like(bits), 0)

    board.check(rank, what, check)


def _declare(board: Board, inputs: AttentionInputs, part: Region, caches: list[Region]) -> None:
    """What the instances may write."""
    for instance in inputs.instances():
        for begin in inputs.partials_of(*instance):
            board.written(part.buffer.at(part.rank, begin, begin + PARTIAL_FLOATS))
        for begin in inputs.appended_by(*instance):
            for cache in caches:
                board.written(cache.buffer.at(cache.rank, begin, begin + inputs.head_dim))
