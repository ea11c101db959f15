"""Linear tasks: every epilogue, normalized or not, with and without bias and batch."""

from __future__ import annotations

import numpy as np
import torch
from support import reference
from support.arrays import ROUNDING, assert_close
from support.batches import decode_batch
from support.bodies.board import Board, Memory, f32

from distmk.abi import MAX_ROWS, Batch, Epilogue, Space
from distmk.graph.regions import Region
from distmk.tasks import Linear, Nop, Sum
from distmk.tasks.scheduling import CANDIDATES_BYTES

CANDIDATE = np.dtype([("value", np.float32), ("token", np.int32)])
FIRST_TOKEN = 1234


def batch_of(board: Board, rank: int, num_rows: int) -> tuple[Region | None, Batch | None]:
    """A row table of `num_rows` decoding sequences; 0: none, for a task of one row that knows of no batch."""
    if not num_rows:
        return None, None
    batch = decode_batch(num_rows, board.rng)
    return board.give_all(rank, batch, "u8", space=Space.HEAP), batch


class Product:
    """The inputs of a linear task, what it gives in float64 ([rows, n], or 2n where paired), and how far off it may be."""

    def __init__(
        self, board: Board, error: float, k: int, n: int, num_rows: int, paired: bool = False, biased: bool = True
    ):
        self.board, self.k, self.n, self.num_rows, self.paired = board, k, n, num_rows, paired
        self.rows, outputs = num_rows or 1, 2 * n if paired else n
        self.x, self.weight = torch.randn(self.rows, k).bfloat16(), torch.randn(outputs, k).bfloat16()
        self.eps = 1e-5 if board.rng.random() < 0.5 else None
        self.bias = torch.randn(outputs) if biased and board.rng.random() < 0.5 else None
        self.error = error
        self.expect()

    def expect(self) -> None:
        """Work out what the inputs give."""
        inputs = (self.x, self.weight, self.bias, self.eps)
        self.want = reference.linear(*inputs)
        self.tolerance = self.error * reference.linear_scale(*inputs) + 1e-6

    @property
    def room(self) -> int:
        """Rows that the task's buffers have."""
        return MAX_ROWS if self.num_rows else 1

    def add(
        self,
        rank: int,
        out: Region,
        epilogue: Epilogue,
        batch: Region | None,
        logits: Region | None = None,
        out_bf16: Region | None = None,
        x: Region | None = None,
        worker: int | None = None,
    ) -> str:
        """Add the task, with its x in memory or where `x` says; returns its name."""
        board, given = self.board, [name for name in ("eps", "bias") if getattr(self, name) is not None]
        what = f"linear {epilogue.name} k={self.k} n={self.n} rows={self.num_rows or 'one'} {' '.join(given)}".strip()
        task = Linear(
            rank,
            what,
            worker,
            x=x or board.give(board.wide(rank, self.k, self.room, dtype="bf16"), self.x),
            slab=board.matrix(rank, self.weight, self.paired),
            out=out,
            out_bf16=out_bf16,
            batch=batch,
            bias=board.vector(rank, self.bias),
            epilogue=epilogue,
            normalized=self.eps is not None,
            eps=self.eps or 0.0,
            num_ranks=board.num_ranks,
            first_token=FIRST_TOKEN,
            logits=logits,
            polls=x is not None,
        )
        board.graph.add(task)
        return what


def columns(board: Board, rank: int, error: float, epilogue: Epilogue, k: int, n: int, num_rows: int) -> None:
    """STORE, ADD and SWIGLU: columns of every row."""
    batch, _ = batch_of(board, rank, num_rows)
    paired = epilogue is Epilogue.SWIGLU
    product = Product(board, error, k, n, num_rows, paired)
    want, tolerance = product.want, product.tolerance
    out = board.wide(rank, n, product.room, dtype="bf16" if paired else "f32")
    out_bf16 = None if paired or board.rng.random() < 0.5 else board.wide(rank, n, product.room, dtype="bf16")
    if epilogue is Epilogue.ADD:
        old = torch.randn(product.rows, n)
        board.give(out, old)
        want, tolerance = want + old, tolerance + 1e-6 * old.abs()
    elif paired:
        # The derivative of silu stays within 1.1, so an error of either factor passes on in proportion.
        (gate, up), (gate_error, up_error) = want.chunk(2, -1), tolerance.chunk(2, -1)
        tolerance = 1.1 * gate_error * up.abs() + gate.abs() * up_error + 4e-6 * (gate * up).abs() + 1e-6
        want = reference.swiglu(want)
        tolerance = tolerance + ROUNDING["bf16"] * (want.abs() + tolerance)
    if out_bf16:
        board.written(out_bf16, product.rows)
    what = product.add(rank, board.written(out, product.rows), epilogue, batch, out_bf16=out_bf16)

    def check(memory: Memory) -> None:
        got = f32(memory, out, product.rows)
        assert_close("", got, want, tolerance)
        if out_bf16:  # bit for bit
            assert_close("rounded ", f32(memory, out_bf16, product.rows), torch.from_numpy(got).bfloat16().float(), 0)

    board.check(rank, what, check)


def push(board: Board, error: float, k: int, n: int, num_rows: int) -> None:
    """Every rank's block in every rank's slots, and there their sum in rank order.

    One worker pushes and adds up: of what its own rank pushes, a sum that ends by what it has seen must know that it is done.
    """
    room, worker = n * MAX_ROWS, int(board.rng.integers(board.num_workers))
    slots = board.buffer(room * board.num_ranks, space=Space.HEAP, lamport=bool(board.rng.integers(2)))
    products, what = [], ""
    for rank in range(board.num_ranks):
        batch, _ = batch_of(board, rank, num_rows)
        product = Product(board, error, k, n, num_rows)
        out = slots.at(rank, rank * room, rank * room + n * product.room)
        what = product.add(rank, out, Epilogue.PUSH, batch, worker=worker)
        products.append(product)
    for rank in range(board.num_ranks):
        blocks = tuple(slots.at(rank, r * room, r * room + n * product.room) for r in range(board.num_ranks))
        for block in blocks:
            board.written(slots.at(rank, block.begin, block.begin + product.rows * n))
        _reduce(board, rank, worker, f"sum of {what}", blocks, products)


def _reduce(
    board: Board, rank: int, worker: int, what: str, blocks: tuple[Region, ...], products: list[Product]
) -> None:
    rows, n = products[0].rows, products[0].n
    batch, _ = batch_of(board, rank, products[0].num_rows)
    add = bool(board.rng.integers(2))
    old = torch.randn(rows, n) if add else torch.zeros(rows, n)
    dst, out_bf16 = (board.wide(rank, n, products[0].room, dtype=dtype) for dtype in ("f32", "bf16"))
    if add:
        board.give(dst, old)
    for written in (dst, out_bf16):
        board.written(written, rows)
    polls = blocks[0].buffer.lamport
    task = Sum(rank, what, worker, blocks=blocks, dst=dst, out_bf16=out_bf16, batch=batch, add=add, polls=polls)
    board.graph.add(task)

    def check(memory: Memory) -> None:
        total, tolerance = old.double(), torch.zeros(rows, n)
        for source, (block, product) in enumerate(zip(blocks, products, strict=True)):
            got = f32(memory, block)[0, : rows * n].reshape(rows, n)
            if polls:
                assert_close(f"cleared block of rank {source} ", got, torch.zeros(rows, n), 0)
                total, tolerance = total + product.want, tolerance + product.tolerance + 1e-6
            else:
                assert_close(f"block of rank {source} ", got, product.want, product.tolerance)
                total = (total.float() + torch.from_numpy(got.copy())).double()
        # Bit for bit where the blocks are known: float32 additions in the order of the ranks.
        assert_close("sum ", f32(memory, dst, rows), total, tolerance)
        summed = torch.from_numpy(f32(memory, dst, rows).copy())
        assert_close("rounded sum ", f32(memory, out_bf16, rows), summed.bfloat16().float(), 0)

    board.check(rank, what, check)


def argmax(board: Board, rank: int, error: float, k: int, n: int, num_rows: int) -> None:
    """One candidate a sampled row, and the logits where they are kept."""
    batch, rows_of_batch = batch_of(board, rank, num_rows)
    product = Product(board, error, k, n, num_rows, biased=False)
    want, tolerance = product.want, product.tolerance
    out = board.written(board.buffer(CANDIDATES_BYTES, dtype="u8").at(rank))
    kept = board.written(board.wide(rank, n, product.room), product.rows) if board.rng.integers(2) else None
    what = product.add(rank, out, Epilogue.ARGMAX, batch, kept) + (" with logits" if kept else "")
    sampled = [row for row in range(product.rows) if rows_of_batch is None or rows_of_batch.rows[row].sample]

    def check(memory: Memory) -> None:
        got = memory[out.buffer].reshape(-1).view(CANDIDATE)
        having = [row for row in range(MAX_ROWS) if got[row]["token"] >= 0]
        assert having == sampled, f"candidates for rows {having}, expected {sampled}"
        for row in sampled:
            token = int(got[row]["token"]) - FIRST_TOKEN
            assert 0 <= token < n, f"row {row}: token {token} of {n}"
            assert_close(f"value of row {row} ", got[row]["value"], want[row, token], tolerance[row, token])
            lead = float(want[row].max() - want[row, token])
            assert lead <= 2 * tolerance[row].max(), f"row {row}: token {token} is {lead} below the best"
            if kept:
                assert_close(f"logits of row {row} ", f32(memory, kept, product.rows)[row], want[row], tolerance[row])

    board.check(rank, what, check)


def rounding(board: Board, rank: int, num_rows: int, k: int) -> None:
    """Bit for bit: with the identity for weights, what is multiplied comes out; what is hard to round is."""
    batch, _ = batch_of(board, rank, num_rows)
    old, room = reference.hard_to_round(num_rows or 1, k), MAX_ROWS if num_rows else 1
    x, add = torch.randn(len(old), k).bfloat16(), bool(board.rng.integers(2))
    x = torch.zeros_like(x) if add else x
    given, out = board.give(board.wide(rank, k, room, dtype="bf16"), x), board.wide(rank, k, room)
    if add:
        board.give(out, old)
    out_bf16 = board.written(board.wide(rank, k, room, dtype="bf16"), len(x))
    what = f"linear rounding k={k} rows={num_rows or 'one'} {'old' if add else 'x'}"
    slab, epilogue = board.matrix(rank, torch.eye(k).bfloat16()), Epilogue.ADD if add else Epilogue.STORE
    board.written(out, len(x))
    board.graph.add(Linear(rank, what, x=given, slab=slab, out=out, out_bf16=out_bf16, batch=batch, epilogue=epilogue))
    want = old if add else x.float()

    def check(memory: Memory) -> None:
        assert_close("", f32(memory, out, len(x)), want, 0)
        assert_close("rounded ", f32(memory, out_bf16, len(x)), want.bfloat16().float(), 0)

    board.check(rank, what, check)


def ties(board: Board, rank: int) -> None:
    """Of equal logits the lowest id wins."""
    weight = torch.ones(40, 32).bfloat16()
    weight[:23] = -1
    out = board.written(board.buffer(CANDIDATES_BYTES, dtype="u8").at(rank))
    x, slab = board.give_all(rank, torch.ones(1, 32).bfloat16(), "bf16"), board.matrix(rank, weight)
    board.graph.add(Linear(rank, "linear ties", x=x, slab=slab, out=out, epilogue=Epilogue.ARGMAX, first_token=7))

    def check(memory: Memory) -> None:
        got = memory[out.buffer].reshape(-1).view(CANDIDATE)[0].item()
        assert got == (32.0, 30), f"best of equal logits is {got}, expected (32.0, 30)"

    board.check(rank, "linear ties", check)


def polls(board: Board, rank: int, error: float, k: int, n: int, num_rows: int) -> None:
    """Two vectors in turn, each taken by products as it is written; who writes one clears the other.

    One worker multiplies both: that it had waited for the first before what lies in between, which looks at nothing, tells
    it that the second's place is clear.
    """
    rows, room, worker = num_rows or 1, MAX_ROWS if num_rows else 1, int(board.rng.integers(board.num_workers))
    places = [board.buffer(k, room, "bf16", lamport=True) for _ in range(2)]
    for place, other in zip(places, reversed(places), strict=True):
        batch, _ = batch_of(board, rank, num_rows)
        product = Product(board, error, k, n, num_rows)
        product.x[:, :: int(board.rng.integers(2, 9))] = 0  # zeros arrive, too
        product.expect()
        block = board.buffer(k * room).at(rank)
        board.give(block.buffer.at(rank, 0, k * rows), product.x.float().reshape(1, -1))
        board.graph.add(
            Sum(
                rank,
                f"vector of {k}",
                blocks=(block,),
                dst=board.written(board.wide(rank, k, room), rows),
                out_bf16=board.written(place.at(rank), rows),
                reset=board.written(other.at(rank), rows),
                batch=batch,
            )
        )
        out = board.written(board.wide(rank, n, room), rows)
        what = product.add(rank, out, Epilogue.STORE, batch, x=place.at(rank), worker=worker)
        board.graph.add(Nop(rank, f"between vectors of {k}", worker))

        def check(memory: Memory, out: Region = out, product: Product = product) -> None:
            assert_close("", f32(memory, out, rows), product.want, product.tolerance)

        board.check(rank, f"arriving x of {what}", check)

    def check_places(memory: Memory) -> None:
        assert_close("cleared ", f32(memory, places[0].at(rank), rows), torch.zeros(rows, k), 0)
        assert_close("", f32(memory, places[1].at(rank), rows), product.x.float(), 0)

    board.check(rank, f"vectors of {k} rows={num_rows}", check_places)
