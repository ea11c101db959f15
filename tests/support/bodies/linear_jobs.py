"""Cases of linear layers in jobs, in a launch of their own: on GPUs a program that has them streams no weights otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from support import reference
from support.bodies.board import Board, f32, in_turn
from support.bodies.linear import cap_error, random_softcap
from support.bodies.packed_linear import random_rows

from distmk.abi import (
    ACTIVATION_BLOCK_COLS,
    GATED,
    M_TILE,
    MAX_BUCKET_ROWS,
    MAX_SEQUENCES,
    ActivationLayout,
    Epilogue,
    JobBatch,
    Space,
)
from distmk.formats.gguf_blocks import GgufBlocks
from distmk.formats.packed_tiles import PackedTiles
from distmk.formats.tiles import pack_rows
from distmk.graph.partition import Partition
from distmk.graph.regions import Region, Slab
from distmk.tasks.activations import RowSet, activation_cols, owned_rows, padded_cols
from distmk.tasks.linear_jobs import LinearJobs, part_slabs
from distmk.testing.arrays import ROUNDING, assert_close
from distmk.testing.memory import Memory

# Slabs of 46 and 48 rows, of an odd number of M tiles, of less than one, some of which are smaller than others.
PARTITIONS = (
    Partition(7 * 46 + 20, 7, 2),
    Partition(5 * 30 + 2 * 48, 7, 2, 2, 48),
    Partition(14, 3, 2),
    Partition(61, 1, 2),
    Partition(187 * 3 + 1, 3, 2),
)
PAIRED = (Partition(187 * 3 + 1, 3, 2), Partition(4 * 46 + 24, 5, 2, 1, 24), Partition(12, 2, 2))
PACKED_K = (64, 320, 576, 2112)
# The last slab has one M tile where the other one has two, and ends at an odd row: a job has no rows.
NO_ROWS = Partition(M_TILE + 2 + M_TILE - 1, 2, 2)
# More M tiles for each of 16 workers than a job has, and a few left.
MANY_TILES = Partition(16 * 9 * M_TILE - 7, 1, 2)
# Enough M tiles for 16 workers to take N tiles of 256 tokens.
WHOLE_TILES = Partition(16 * 5 * M_TILE + 3, 2, 2)


Case = Callable[[], None]  # adds tasks to the board


class Product(NamedTuple):
    """found: a format of packed tiles; None: bf16."""

    k: int
    partition: Partition
    epilogue: Epilogue
    num_k_splits: int = 1
    found: type[PackedTiles] | None = None

    @property
    def kind(self) -> str:
        return f"{'packed ' if self.found else ''}linear_jobs {self.epilogue.name}"


def cases(board: Board, error: float, all_k: tuple[int, ...]) -> Iterator[Case]:
    """Every epilogue, with numbers of rows that take one N tile of each size, and several.

    On several ranks, short rows of the matrices will do.
    """
    rng, all_k = board.rng, all_k if board.num_ranks == 1 else all_k[:2]

    def drawn(epilogue: Epilogue, num_k_splits: int = 1) -> Product:
        partitions = PAIRED if epilogue in GATED else PARTITIONS
        return Product(int(rng.choice(all_k)), partitions[int(rng.integers(len(partitions)))], epilogue, num_k_splits)

    def case(rows: int, *products: Product) -> Case:
        return partial(_in_a_row, board, error, rows, products)

    gated = in_turn(rng, GATED)
    for low, high in ((1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, MAX_BUCKET_ROWS)):
        parts = drawn(Epilogue.PARTS, int(rng.integers(1, 3)))
        rows = int(rng.choice([high, rng.integers(low, high + 1)]))
        yield case(rows, drawn(Epilogue.STORE), drawn(next(gated)), parts)
    if board.num_ranks == 1:
        yield from _large_cases(case, rng, all_k)
    for rows in (1, 16, int(rng.integers(17, 65)), MAX_SEQUENCES, 0):
        yield case(rows, drawn(Epilogue.LOGITS))
    yield case(0, drawn(Epilogue.STORE))
    yield case(int(rng.integers(1, 33)), Product(64, NO_ROWS, Epilogue.STORE))


def packed_cases(board: Board, error: float, formats: Sequence[type[PackedTiles]]) -> Iterator[Case]:
    """Every epilogue in each format. Some shards begin inside of a group, and some tasks have a part of a matrix."""
    rng = board.rng
    gated = in_turn(rng, GATED)

    def drawn(found: type[PackedTiles], epilogue: Epilogue) -> Product:
        partitions = PAIRED if epilogue in GATED else PARTITIONS
        num_k_splits = int(rng.integers(1, 3)) if epilogue is Epilogue.PARTS else 1
        k = int(rng.choice(PACKED_K if board.num_ranks == 1 else PACKED_K[:2]))
        return Product(k, partitions[int(rng.integers(len(partitions)))], epilogue, num_k_splits, found)

    for found in formats:
        rows = int(rng.choice([rng.integers(1, 65), rng.integers(65, 129), rng.integers(129, 300)]))
        epilogues = (Epilogue.STORE, next(gated), Epilogue.PARTS)
        yield partial(_in_a_row, board, error, rows, tuple(drawn(found, epilogue) for epilogue in epilogues))
        yield partial(_in_a_row, board, error, int(rng.integers(1, 129)), (drawn(found, Epilogue.LOGITS),))
    without_rows = Product(64, NO_ROWS, Epilogue.STORE, 1, formats[int(rng.integers(len(formats)))])
    yield partial(_in_a_row, board, error, int(rng.integers(1, 65)), (without_rows,))


def _large_cases(case: Callable[..., Case], rng: np.random.Generator, all_k: tuple[int, ...]) -> Iterator[Case]:
    """Products whose division into jobs matters, which does not depend on the number of ranks."""
    # Jobs whose M tiles do not divide the ring, over more K tiles than it holds, beside shorter ones.
    ks = ((64, 2), (max(all_k), 2), (min(all_k), 1), (33 * ACTIVATION_BLOCK_COLS, 2))
    parts_of_k = [Product(k, PARTITIONS[0], Epilogue.PARTS, num_k_splits) for k, num_k_splits in ks]
    yield case(int(rng.integers(17, 65)), *(parts_of_k[i] for i in rng.permutation(len(ks))))
    yield case(int(rng.integers(129, 257)), Product(320, WHOLE_TILES, Epilogue.STORE))
    yield case(int(rng.integers(257, MAX_BUCKET_ROWS + 1)), Product(320, WHOLE_TILES, Epilogue.PARTS, 2))
    many = [Product(k, MANY_TILES, Epilogue.PARTS, 1 + (k > 320)) for k in (320, 448, 640)]
    yield case(int(rng.integers(17, 65)), *many)


def lane_order(num_cols: int) -> torch.Tensor:
    """The column at each place of LANE_TILES: of every 32, pair t of chunk j has the place of pair j of chunk t."""
    return torch.arange(num_cols).reshape(-1, 4, 4, 2).transpose(1, 2).reshape(-1)


def activations(x: torch.Tensor, layout: int) -> torch.Tensor:
    """bf16 rows [rows, k] as activations, [1, elements]: what is in no row is NaN (distmk/tasks/activations.py)."""
    rows, k = x.shape
    if not layout:
        return torch.cat([x, torch.full((MAX_BUCKET_ROWS - rows, k), torch.nan, dtype=x.dtype)]).reshape(1, -1)
    whole = torch.full((MAX_BUCKET_ROWS, padded_cols(k)), torch.nan, dtype=x.dtype)
    whole[:rows], whole[:rows, k:] = 0, 0
    whole[:rows, :k] = x
    if layout == ActivationLayout.LANE_TILES:
        whole = whole[:, lane_order(whole.shape[1])]
    return _swizzled(whole.reshape(MAX_BUCKET_ROWS, -1, ACTIVATION_BLOCK_COLS).transpose(0, 1)).reshape(1, -1)


def activation_rows(content: np.ndarray, num_rows: int, k: int, layout: int) -> np.ndarray:
    """The inverse of activations(): [rows, k], or up to the end of the last block in tiles."""
    if not layout:
        return content.reshape(MAX_BUCKET_ROWS, k)[:num_rows]
    blocks = _swizzled(torch.from_numpy(content.copy()).reshape(-1, MAX_BUCKET_ROWS, ACTIVATION_BLOCK_COLS))
    rows = blocks.transpose(0, 1).reshape(MAX_BUCKET_ROWS, -1)[:num_rows]
    return (rows[:, lane_order(rows.shape[1])] if layout == ActivationLayout.LANE_TILES else rows).numpy()


def _swizzled(blocks: torch.Tensor) -> torch.Tensor:
    """Chunk c of row r for chunk c ^ r % 8 of [blocks, rows, ACTIVATION_BLOCK_COLS], and so the other way round."""
    chunks = blocks.reshape(*blocks.shape[:2], -1, 8)
    source = torch.arange(chunks.shape[2])[None] ^ (torch.arange(chunks.shape[1]) % 8)[:, None]
    return chunks.gather(2, source[None, :, :, None].expand(chunks.shape)).reshape(blocks.shape)


def _batch(board: Board, rank: int, num_rows: int, sampled: bool) -> Region:
    batch = JobBatch()
    if sampled:
        batch.batch.num_rows, batch.batch.num_job_rows = (
            num_rows,
            int(board.rng.integers(num_rows, MAX_BUCKET_ROWS + 1)),
        )
    else:
        batch.batch.num_job_rows = num_rows
    return board.filled(rank, batch, "u8", space=Space.HEAP)


def _matrix(board: Board, rank: int, weight: torch.Tensor, partition: Partition, paired: bool) -> Slab:
    rows = weight.view(torch.int16).numpy().view(np.uint16)
    sizes = [end - begin for begin, end in partition.ranges]
    packed = pack_rows(rows, sizes, paired) if board.gpu_layout else rows
    slab = board.graph.constant(board.name("w"), rank, packed)
    return slab


def _by_slab(partition: Partition, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, [rows, n / 2] each: columns [rows, n] in the order of the slabs."""
    slabs = [values[:, begin:end].chunk(2, 1) for begin, end in partition.ranges]
    return torch.cat([gate for gate, _ in slabs], 1), torch.cat([up for _, up in slabs], 1)


def _in_a_row(board: Board, error: float, rows: int, products: Sequence[Product]) -> None:
    """Products of the rows of one batch, one after another: the weights of each are copied before its inputs are there."""
    sampled = products[0].epilogue is Epilogue.LOGITS
    batches = [_batch(board, rank, rows, sampled) for rank in range(board.num_ranks)]
    for product in products:
        _on_all_ranks(board, error, rows, product, batches)


def _on_all_ranks(board: Board, error: float, rows: int, product: Product, batches: Sequence[Region]) -> None:
    """Each rank has a matrix of its own; every rank has the same rows."""
    n, num_k_splits = product.partition.total, product.num_k_splits
    num_parts, first_part = board.num_ranks * num_k_splits + 1, 1
    parts = board.buffer(num_parts * n, owned_rows(board.num_ranks), space=Space.HEAP)
    for rank, batch in enumerate(batches):
        make = _PackedProduct if product.found else _Product
        make(board, rank, error, rows, product, batch).add(parts, num_k_splits, first_part + rank * num_k_splits)


class _Product:
    def __init__(self, board: Board, rank: int, error: float, rows: int, product: Product, batch: Region) -> None:
        self.board, self.rank, self.k, self.rows, self.batch = board, rank, product.k, rows, batch
        self.partition, self.epilogue, self.kind, self.error = product.partition, product.epilogue, product.kind, error
        self.layout = out_layout = int(board.gpu_layout)
        if board.gpu_layout and product.found and board.rng.random() < 0.5:
            out_layout = int(ActivationLayout.LANE_TILES)
        self.out_layout = ActivationLayout(out_layout)
        self.part = (
            self._draw_part() if product.found and self.epilogue is Epilogue.STORE else (0, self.partition.total)
        )
        self.n = self.part[1] - self.part[0]
        self.x = torch.randn(rows, self.k).bfloat16()
        self.bias = torch.randn(self.n) if board.rng.random() < 0.5 else None
        # GPUs multiply matrices that have their scale, but for packed ones.
        can_scale = product.found or not board.gpu_layout
        self.scale = float(board.rng.choice([0.22, -3.0])) if can_scale and board.rng.random() < 0.5 else 1.0
        self.slab = self._draw_slab(product)
        self._compute()

    def _draw_slab(self, product: Product) -> Slab:
        self.weight = torch.randn(self.n, self.k).bfloat16()
        self.slack = torch.zeros(1)
        return _matrix(self.board, self.rank, self.weight, self.partition, self.epilogue in GATED)

    def _draw_part(self) -> tuple[int, int]:
        """Rows of the matrix: all, or some that begin and end inside of slabs."""
        total = self.partition.total
        first = 2 * int(self.board.rng.integers(total // 4))
        last = int(self.board.rng.choice([total, first + 2 + 2 * int(self.board.rng.integers((total - first) // 2))]))
        return (first, min(last, total)) if self.board.rng.random() < 0.7 else (0, total)

    def _compute(self) -> None:
        """The output, and how much it may be off. slack: how much each weight may be off."""
        board, epilogue, error = self.board, self.epilogue, self.error
        scaled = self.scale * self.weight.double()
        self.want = reference.linear(self.x, scaled, self.bias)
        self.tolerance = error * reference.linear_scale(self.x, scaled, self.bias) + 1e-6
        self.tolerance += abs(self.scale) * (self.x.double().abs() @ self.slack.expand_as(self.weight).double().T)
        if epilogue in GATED:
            by_slab = (_by_slab(self.partition, each) for each in (self.want, self.tolerance))
            (gate, up), (gate_error, up_error) = by_slab
            self.want = reference.gated(epilogue, torch.cat([gate, up], 1))
            self.tolerance = 1.13 * gate_error * (up.abs() + up_error) + gate.abs() * up_error
            self.tolerance += error * (gate * up).abs() + 1e-6
        self.softcap = random_softcap(board, self.want) if epilogue is Epilogue.LOGITS else None
        self.want, self.tolerance = reference.softcap(self.want, self.softcap), self.tolerance + cap_error(self.softcap)
        if epilogue in (*GATED, Epilogue.STORE):
            self.tolerance = self.tolerance + ROUNDING["bf16"] * (self.want.abs() + self.tolerance)

    def add(self, parts: Any, num_k_splits: int, first_part: int) -> None:
        board, rank, epilogue = self.board, self.rank, self.epilogue
        sampled = epilogue is Epilogue.LOGITS
        blocks = (
            padded_cols(self.k) // ACTIVATION_BLOCK_COLS if board.gpu_layout else 1
        )  # a row of the buffer each, for `check`
        x = board.filled(rank, activations(self.x, self.layout), "bf16", blocks if sampled else 1)
        n = self.n
        what = f"{self.kind} k={self.k} rows={self.rows} {self.partition}"
        what += f" {self.slab.weight.format.name} part={self.part} splits={num_k_splits}"
        what += " bias" if self.bias is not None else ""
        out = parts.at(rank, first_part * n, (first_part + num_k_splits) * n)
        if epilogue in GATED:
            out = board.buffer(activation_cols(n // 2, board.gpu_layout), dtype="bf16").at(rank)
        elif epilogue is not Epilogue.PARTS:
            dtype, room = ("f32", MAX_SEQUENCES) if sampled else ("bf16", MAX_BUCKET_ROWS)
            out = board.padded(rank, n, room, dtype=dtype)
        self._expect(what, out, num_k_splits)
        board.graph.add(
            LinearJobs(
                rank,
                what,
                x=x,
                slab=self.slab,
                out=out,
                batch=self.batch,
                partition=self.partition,
                part=self.part,
                bias=board.vector(rank, self.bias),
                epilogue=epilogue,
                num_k_splits=num_k_splits,
                first_part=first_part if epilogue is Epilogue.PARTS else 0,
                num_ranks=board.num_ranks,
                tiled=board.gpu_layout,
                rows=RowSet.SAMPLED if sampled else RowSet.ALL,
                softcap=self.softcap or 0.0,
                scale=self.scale,
                out_layout=self.out_layout,
            )
        )

    def _expect(self, what: str, out: Region, num_k_splits: int) -> None:
        board, kind = self.board, self.kind
        if self.epilogue is Epilogue.PARTS:
            for owner in range(board.num_ranks):
                share = -(-self.rows // board.num_ranks)
                owned = slice(min(owner * share, self.rows), min((owner + 1) * share, self.rows))
                board.writable(out.on(owner), owned.stop - owned.start)
                check = partial(self._check_parts, out=out.on(owner), owned=owned, num_k_splits=num_k_splits)
                board.expect(owner, kind, what, check, of=self.rank)
        elif self.epilogue in GATED:
            board.writable(out)
            board.expect(self.rank, kind, what, partial(self._check_activations, out=out))
        else:
            board.writable(out, self.rows)
            board.expect(self.rank, kind, what, partial(self._check_rows, out=out))

    def _check_rows(self, memory: Memory, out: Region) -> None:
        assert_close("", f32(memory, out, self.rows), self.want, self.tolerance)

    def _check_activations(self, memory: Memory, out: Region) -> None:
        n = self.partition.total // 2
        got = activation_rows(f32(memory, out)[0], self.rows, n, self.out_layout)
        assert_close("", got[:, :n], self.want, self.tolerance)
        assert_close("beyond the last column ", got[:, n:], np.zeros_like(got[:, n:]), 0)

    def _check_parts(self, memory: Memory, out: Region, owned: slice, num_k_splits: int) -> None:
        got = f32(memory, out, owned.stop - owned.start).reshape(-1, num_k_splits, self.n)
        assert np.isfinite(got).all(), "a part is not finite"
        assert_close("sum of parts ", got.sum(1, dtype=np.float64), self.want[owned], self.tolerance[owned])


class _PackedProduct(_Product):
    """A product with packed tiles, whose weights are rounded to bf16 when they are decoded."""

    def _draw_slab(self, product: Product) -> Slab:
        board, found = self.board, product.found
        assert found
        blocks = -(-found.group_cols // ACTIVATION_BLOCK_COLS)
        lead = ACTIVATION_BLOCK_COLS * int(board.rng.choice([0, board.rng.integers(blocks)]))
        lead = 0 if self.epilogue is Epilogue.LOGITS else lead
        tail = int(board.rng.integers(0, found.group_cols))
        if issubclass(found, GgufBlocks):  # rows are whole blocks
            tail = -(lead + self.k) % found.group_cols
        rows, magnitudes = random_rows(found, self.n, lead + self.k + tail, board.rng)
        cols = slice(lead + self.k)
        exact = torch.from_numpy(found.values(rows))[:, cols].double()
        self.weight, self.slack = exact, torch.zeros(1)
        if not found.has_row_scales:
            # Scales have 16 bits, and minima are added to 128 + code times the scale in float32. So a weight in the middle
            # between two bf16 numbers may become either.
            off = 2.0**-16 * exact.abs() + 2.0**-20 * magnitudes.amax(1, keepdim=True)
            below, self.weight, above = ((exact + sign * off).float().bfloat16().double() for sign in (-1, 0, 1))
            self.slack = above - below
        self.x = torch.cat([torch.zeros(self.rows, lead).bfloat16(), self.x], 1)
        self.k += lead
        self.layout = ActivationLayout.LANE_TILES
        slabs = tuple(part_slabs(self.partition, *self.part)[1])
        return board.packed_matrix(self.rank, found, rows, lead, tail, self.epilogue in GATED, slabs)
