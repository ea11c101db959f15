"""Cases of attention, launched massively or spread over all workers, and of up to three combines behind it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from support.bodies.attention_inputs import PLAIN, AttentionInputs, Heads
from support.bodies.board import Board, f32
from support.reference import Scoring

from distmk.abi import FUSED_PARTIAL_HEADER, MAX_ROWS, PARTIAL_FLOATS, LaunchKind, Space
from distmk.graph.regions import Region
from distmk.tasks import Attention, Combine, Nop
from distmk.tasks.attention import attention_type
from distmk.testing.arrays import assert_close
from distmk.testing.memory import Memory

CAP_ERROR = 2e-5  # of a capped score, relative to the cap
USUAL_SCORES = 2.0  # the standard deviation of scores up to which an error is the usual one


def operands(board: Board, rank: int, inputs: AttentionInputs) -> dict[str, Any]:
    """What an attention task of these inputs reads, by field."""
    qkv = board.fill(board.buffer(inputs.qkv.shape[1], MAX_ROWS).at(rank), inputs.qkv)
    q_norm, k_norm = (board.vector(rank, norm) for norm in inputs.norms or (None, None))
    return {
        "shape": inputs.shape,
        "qkv": qkv.buffer.at(rank, 0, inputs.shape.qkv_cols),
        "page_table": board.filled(rank, inputs.pages, "i32", space=Space.HEAP),
        "batch": board.filled(rank, inputs.batch, "u8", space=Space.HEAP),
        "rope": board.graph.constant(board.name("rope"), rank, inputs.rope.numpy()),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "eps": 1e-6,
    }


class Caches:
    """The K and V caches of a task: filled with the old positions, writable where new ones are appended."""

    def __init__(self, board: Board, rank: int, inputs: AttentionInputs) -> None:
        self.inputs, self.gpu_layout = inputs, board.gpu_layout
        stored = inputs.swizzled(inputs.caches) if board.gpu_layout else inputs.caches
        self.k, self.v = (board.filled(rank, cache, "bf16", space=Space.LOCAL) for cache in stored)
        for begin in (begin for instance in inputs.instances() for begin in inputs.appended_by(*instance)):
            for cache in (self.k, self.v):
                board.writable(cache.buffer.at(rank, begin, begin + inputs.head_dim))

    def read(self, memory: Memory) -> torch.Tensor:
        """Both caches as they are now, bf16 [K and V, page, KV head, position, head_dim]."""
        raw = np.stack([memory[cache.buffer].reshape(-1) for cache in (self.k, self.v)])
        stored = torch.from_numpy(raw).view(torch.bfloat16).view(self.inputs.caches.shape)
        return self.inputs.swizzled(stored) if self.gpu_layout else stored


def allowed_error(inputs: AttentionInputs, usual: float) -> float:
    """The usual error, more for large scores, whose rounding grows with them, and for capped ones."""
    deviation = inputs.shape.scores.encode(inputs.head_dim).scale * inputs.head_dim**0.5
    return usual * max(1.0, deviation / USUAL_SCORES) + CAP_ERROR * (inputs.how.scores.softcap or 0)


def declare_partials(board: Board, inputs: AttentionInputs, partials: Region) -> None:
    for instance in inputs.instances():
        for begin in inputs.partials_of(*instance):
            board.writable(partials.buffer.at(partials.rank, begin, begin + PARTIAL_FLOATS))


def declare_fused_partials(board: Board, inputs: AttentionInputs, fused: Region) -> None:
    """The fused partials that the splits of a batch-1 row may write; nobody reads more of a header than its first word."""
    s, size = inputs.shape, FUSED_PARTIAL_HEADER + inputs.head_dim
    for head in range(s.num_q):
        for split in range(inputs.splits(0)):
            begin = head * (s.fused_partial_cols // s.num_q) + split * size
            board.writable(fused.buffer.at(fused.rank, begin, begin + size))


def attention(
    board: Board,
    rank: int,
    error: float,
    heads: Heads,
    head_dim: int,
    page_size: int,
    norms: bool,
    max_len: int,
    how: Scoring = PLAIN,
) -> None:
    inputs = AttentionInputs(board.rng, heads, head_dim, page_size, norms, max_len, how=how)
    error = allowed_error(inputs, error)
    inputs.values_without(int(board.rng.integers(head_dim)))
    _add(board, rank, inputs, error, error)


def long_splits(board: Board, rank: int, error: float, window: int) -> None:
    """Decode rows of sequences longer than the window, a split each, whose keys and values come through the pipeline."""
    runs = [(1, int(slot), int(board.rng.integers(window, 2 * window))) for slot in board.rng.permutation(MAX_ROWS)[:3]]
    inputs = AttentionInputs(board.rng, Heads(3, 3), 64, 16, False, 2 * window, how=Scoring(window), runs=runs)
    inputs.shape = replace(inputs.shape, num_workers=len(runs))
    for worker in range(
        board.num_workers
    ):  # a GPU's worker assigns itself work only so far behind its last attention task
        for _ in range(3):
            board.graph.add(Nop(rank, "between attention tasks", worker=worker))
    _add(board, rank, inputs, error, error, pipelined=True)


def extreme_scores(board: Board, rank: int, max_len: int, combined_error: float) -> None:
    """Scores in the hundreds: only a softmax that subtracts the maximum survives them. The rounding of a score grows with it,
    so that partials are not compared.
    """
    inputs = AttentionInputs(board.rng, Heads(2, 2), 32, 8, False, max_len)
    inputs.qkv[:, : inputs.shape.num_q * inputs.head_dim] *= 100
    _add(board, rank, inputs, None, combined_error)


def _add(
    board: Board,
    rank: int,
    inputs: AttentionInputs,
    partial_error: float | None,
    combined_error: float,
    pipelined: bool = False,
) -> None:
    s, rows = inputs.shape, inputs.batch.num_rows
    launch = LaunchKind.SPREAD if pipelined or board.rng.random() < 0.5 else LaunchKind.MASSIVE
    long_splits = launch is LaunchKind.SPREAD and (pipelined or board.rng.random() < 0.8)
    kind = attention_type(s)
    long_splits &= kind is Attention
    what = f"{launch.name} {kind.type_name} {'through the pipeline ' * long_splits}{s} {inputs.runs}"
    read, caches = operands(board, rank, inputs), Caches(board, rank, inputs)
    partials = board.buffer(s.num_partials, lamport=bool(board.rng.integers(2))).at(rank)
    polls = partials.buffer.lamport
    declare_partials(board, inputs, partials)
    board.graph.add(
        kind(
            rank,
            what,
            launch=launch,
            k_cache=caches.k,
            v_cache=caches.v,
            partials=partials,
            long_splits=long_splits,
            **read,
        )
    )
    out = board.writable(board.padded(rank, s.num_q * s.head_dim, MAX_ROWS, dtype="bf16"), rows)
    reset = board.buffer(out.buffer.cols, MAX_ROWS, "bf16").at(rank, out.begin, out.end)
    board.writable(board.fill(reset, torch.ones(rows, out.cols).bfloat16()), rows)
    total = s.num_q * s.slices
    cuts = sorted(int(cut) for cut in board.rng.integers(0, total, 2))
    for slices in pairwise((0, *cuts, total)):
        if slices[0] < slices[1]:
            _combine(board, what, inputs, slices, (partials, out, reset), read["batch"])

    def check(memory: Memory) -> None:
        after = caches.read(memory)
        inputs.check_caches(after)
        parts = memory[partials.buffer].reshape(-1).view(np.float32)
        if polls:
            assert_close("partials, reset ", parts, np.zeros_like(parts), 0)
        elif partial_error:
            inputs.check_partials(parts, after, partial_error)
        inputs.check_combined(f32(memory, out, MAX_ROWS), after, combined_error)
        assert_close("reset ", f32(memory, reset, rows), np.zeros((rows, reset.cols)), 0)
        if board.gpu_layout:  # a GPU's tasks poll rows of bf16, so a zero is published as the negative one
            bits = memory[out.buffer][:rows].view(np.uint16)[:, out.begin : out.end]
            assert_close("positive zeros ", bits == 0, np.zeros_like(bits), 0)

    board.expect(rank, kind.type_name, what, check)


def _combine(
    board: Board,
    what: str,
    inputs: AttentionInputs,
    slices: tuple[int, int],
    regions: tuple[Region, Region, Region],
    batch: Region,
) -> None:
    """A combine of some slices of (partials, out, reset)."""
    s, (partials, out, reset), (begin, end) = inputs.shape, regions, slices
    columns = [
        each.buffer.at(each.rank, each.begin + s.slice_begin(begin), each.begin + s.slice_begin(end))
        for each in (out, reset)
    ]
    task = Combine(
        out.rank,
        f"combine of {what}, slices {begin} to {end}",
        shape=s,
        slices=slices,
        partials=partials.buffer.at(partials.rank, begin * s.partial_cols, end * s.partial_cols),
        out=columns[0],
        lamport_reset=columns[1],
        batch=batch,
        polls_partials=partials.buffer.lamport,
    )
    board.graph.add(task)
