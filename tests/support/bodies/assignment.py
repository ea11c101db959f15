"""Cases of two attention tasks in a row with the same batch and shape, of which only one fuses its combine into a product."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from support.bodies.attention import Caches, declare_fused_partials, declare_partials, operands
from support.bodies.attention_inputs import AttentionInputs, Heads
from support.bodies.board import Board

from distmk.abi import COMBINE_WIDTH, LaunchKind
from distmk.tasks import Attention
from distmk.testing.memory import Memory


def one_of_two_fuses_combine(
    board: Board, rank: int, error: float, heads: Heads, head_dim: int, max_len: int, fused_first: bool
) -> None:
    """A batch-1 row whose combine is fused has up to COMBINE_WIDTH splits, else more: a worker must not take the work
    assignment of one task for that of the other.
    """
    fused = AttentionInputs(board.rng, heads, head_dim, 16, False, max_len, batch_1=True, fused_partials=True)
    fused.shape = replace(fused.shape, num_workers=2 * COMBINE_WIDTH * heads.num_kv, max_kv_splits=4 * COMBINE_WIDTH)
    separate = copy(fused)
    separate.fused_partials = False
    assert fused.fuses_combine and fused.splits(0) < separate.splits(0)
    shared = operands(board, rank, fused)
    for inputs in (fused, separate) if fused_first else (separate, fused):
        _add(board, rank, error, inputs, shared)


def _add(board: Board, rank: int, error: float, inputs: AttentionInputs, shared: dict[str, Any]) -> None:
    s = inputs.shape
    what = f"attention {'with' if inputs.fused_partials else 'without'} a fused combine {s} {inputs.runs}"
    caches, partials = Caches(board, rank, inputs), board.buffer(s.num_partials).at(rank)
    fused = board.buffer(s.fused_partial_cols, dtype="bf16").at(rank) if inputs.fused_partials else None
    board.graph.add(
        Attention(
            rank,
            what,
            launch=LaunchKind.SPREAD,
            k_cache=caches.k,
            v_cache=caches.v,
            partials=partials,
            fused_partials=fused,
            **shared,
        )
    )
    if fused:
        declare_fused_partials(board, inputs, fused)
    else:
        declare_partials(board, inputs, partials)

    def check(memory: Memory) -> None:
        after = caches.read(memory)
        inputs.check_caches(after)
        if fused:
            inputs.check_fused_partials(memory[fused.buffer].reshape(-1).view(np.uint16), after, error)
        else:
            inputs.check_partials(memory[partials.buffer].reshape(-1).view(np.float32), after, error)

    board.expect(rank, "attention", what, check)
