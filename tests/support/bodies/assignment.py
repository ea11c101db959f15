"""Two attention tasks in a row with the same batch and shape, of which only one fuses its combine into a product."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.attention_inputs import AttentionInputs, Heads
from support.bodies.board import Board, Memory

from distmk.abi import COMBINE_WIDTH, MAX_ROWS, PARTIAL_FLOATS, LaunchKind, Space
from distmk.tasks import Attention


def one_of_two_fuses_combine(
    board: Board, rank: int, error: float, heads: Heads, head_dim: int, max_len: int, fused_first: bool
) -> None:
    """A batch-1 row whose combine is fused has up to COMBINE_WIDTH splits, else more: a worker must not take the work
    assignment of one task for that of the other.
    """
    fused = AttentionInputs(board.rng, heads, head_dim, 16, False, max_len, alone=True, fused_partials=True)
    fused.shape = replace(fused.shape, num_workers=2 * COMBINE_WIDTH * heads.num_kv, max_splits=4 * COMBINE_WIDTH)
    separate = copy(fused)
    separate.fused_partials = False
    assert fused.has_lone_row and fused.splits(0) < separate.splits(0)
    qkv = board.give(board.buffer(fused.qkv.shape[1], MAX_ROWS).at(rank), fused.qkv)
    shared = {
        "qkv": qkv.buffer.at(rank, 0, fused.shape.qkv_cols),
        "page_table": board.give_all(rank, fused.pages, "i32", space=Space.HEAP),
        "batch": board.give_all(rank, fused.batch, "u8", space=Space.HEAP),
        "rope": board.graph.constant(board.name("rope"), rank, fused.rope.numpy()),
    }
    order = (fused, separate) if fused_first else (separate, fused)
    for inputs in order:
        _add(board, rank, error, inputs, shared)


def _add(board: Board, rank: int, error: float, inputs: AttentionInputs, shared: dict[str, Any]) -> None:
    s = inputs.shape
    what = f"attention {'with' if inputs.fused_partials else 'without'} a fused combine {s} {inputs.runs}"
    caches = [board.give_all(rank, each, "bf16", space=Space.LOCAL) for each in inputs.kept(inputs.caches, board.tiled)]
    partials = board.buffer(s.num_partials).at(rank)
    fused = board.buffer(s.fused_partial_cols, dtype="bf16").at(rank) if inputs.fused_partials else None
    board.graph.add(
        Attention(
            rank,
            what,
            launch=LaunchKind.SPREAD,
            shape=s,
            k_cache=caches[0],
            v_cache=caches[1],
            partials=partials,
            fused_partials=fused,
            **shared,
        )
    )
    for instance in inputs.instances():
        for begin in inputs.appended_by(*instance):
            for cache in caches:
                board.written(cache.buffer.at(rank, begin, begin + inputs.head_dim))
        for begin in [] if fused else inputs.partials_of(*instance):
            board.written(partials.buffer.at(rank, begin, begin + PARTIAL_FLOATS))
    if fused:
        board.written(fused)

    def check(memory: Memory) -> None:
        raw = np.stack([memory[cache.buffer].reshape(-1) for cache in caches])
        after = inputs.kept(torch.from_numpy(raw).view(torch.bfloat16).view(inputs.caches.shape), board.tiled)
        inputs.check_caches(after)
        if fused:
            inputs.check_lone(memory[fused.buffer].reshape(-1).view(np.uint16), after, error)
        else:
            inputs.check_parts(memory[partials.buffer].reshape(-1).view(np.float32), after, error)

    board.check(rank, what, check)
