"""Cases of linear tasks: every epilogue, normalized or not, with and without bias and batch."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from support import reference
from support.batches import decode_batch
from support.bodies.board import Board, f32
from support.bodies.input_norm import InputNorm

from distmk.abi import GATED, MAX_ROWS, Batch, Epilogue, RowSample, Space
from distmk.graph.regions import Region
from distmk.tasks import Linear, Nop, ScaledLinear, Sum
from distmk.tasks.scheduling import candidates_bytes
from distmk.testing.arrays import ROUNDING, assert_close
from distmk.testing.memory import Memory

CANDIDATE = np.dtype([("value", np.float32), ("token", np.int32)])


def batch_of(board: Board, rank: int, num_rows: int) -> tuple[Region | None, Batch | None]:
    """A row table of `num_rows` decoding sequences; 0: none, for a task of one row that knows of no batch."""
    if not num_rows:
        return None, None
    batch = decode_batch(num_rows, board.rng)
    return board.filled(rank, batch, "u8", space=Space.HEAP), batch


class Product:
    """The inputs of a linear task. `error`: of the output, in proportion to the magnitudes that are added up."""

    kind = "linear"

    def __init__(
        self, board: Board, error: float, k: int, n: int, num_rows: int, paired: bool = False, biased: bool = True
    ):
        self.board, self.error, self.k, self.n, self.num_rows, self.paired = board, error, k, n, num_rows, paired
        self.rows, outputs = num_rows or 1, 2 * n if paired else n
        self.x, self.weight = torch.randn(self.rows, k).bfloat16(), torch.randn(outputs, k).bfloat16()
        self.eps = 1e-5 if board.rng.random() < 0.5 else None
        self.bias = torch.randn(outputs) if biased and board.rng.random() < 0.5 else None
        self.first_token = int(board.rng.integers(50_000))
        self.softcap: float | None = None

    @cached_property
    def want(self) -> torch.Tensor:
        """The output, float64 [rows, n], or [rows, 2n] where paired."""
        return reference.linear(self.x, self.weight, self.bias, self.eps)

    @cached_property
    def tolerance(self) -> torch.Tensor:
        return self.error * reference.linear_scale(self.x, self.weight, self.bias, self.eps) + 1e-6

    @property
    def room(self) -> int:
        """Rows of the task's buffers."""
        return MAX_ROWS if self.num_rows else 1

    def add(
        self,
        rank: int,
        out: Region,
        epilogue: Epilogue,
        batch: Region | None,
        logits: Region | None = None,
        keeps_logits: bool = False,
        out_bf16: Region | None = None,
        x: Region | None = None,
        worker: int | None = None,
    ) -> str:
        """Add the task and return its name. x: None to read it from memory, a Lamport region to poll it."""
        board, given = self.board, [name for name in ("eps", "bias") if getattr(self, name) is not None]
        what = f"linear {epilogue.name} k={self.k} n={self.n} rows={self.num_rows or 'one'} {' '.join(given)}".strip()
        task = Linear(
            rank,
            what,
            worker,
            x=x or board.fill(board.padded(rank, self.k, self.room, dtype="bf16"), self.x),
            slab=board.matrix(rank, self.weight, self.paired),
            out=out,
            out_bf16=out_bf16,
            batch=batch,
            bias=board.vector(rank, self.bias),
            epilogue=epilogue,
            applies_rms=self.eps is not None,
            eps=self.eps or 0.0,
            num_ranks=board.num_ranks,
            first_token=self.first_token,
            logits=logits,
            keeps_logits=keeps_logits,
            softcap=self.softcap or 0.0,
            polls_x=x is not None,
        )
        board.graph.add(task)
        return what


def columns(
    board: Board,
    rank: int,
    error: float,
    epilogue: Epilogue,
    k: int,
    n: int,
    num_rows: int,
    make: type[Product] = Product,
) -> None:
    """STORE, ADD and gated epilogues: columns of every row."""
    batch, _ = batch_of(board, rank, num_rows)
    paired = epilogue in GATED
    product = make(board, error, k, n, num_rows, paired)
    out = board.writable(board.padded(rank, n, product.room, dtype="bf16" if paired else "f32"), product.rows)
    old = torch.randn(product.rows, n)
    if epilogue is Epilogue.ADD:
        board.fill(out, old)
    out_bf16 = None
    if not paired and board.rng.random() < 0.5:
        out_bf16 = board.writable(board.padded(rank, n, product.room, dtype="bf16"), product.rows)
    what = product.add(rank, out, epilogue, batch, out_bf16=out_bf16)

    def check(memory: Memory) -> None:
        got = f32(memory, out, product.rows)
        assert_close("", got, *_after_epilogue(product, epilogue, old))
        if out_bf16:  # bit for bit
            assert_close("rounded ", f32(memory, out_bf16, product.rows), torch.from_numpy(got).bfloat16().float(), 0)

    board.expect(rank, f"{make.kind} {epilogue.name}", what, check)


def _after_epilogue(product: Product, epilogue: Epilogue, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a task and its tolerance."""
    want, tolerance = product.want, product.tolerance
    if epilogue is Epilogue.ADD:
        return want + old, tolerance + 1e-6 * old.abs()
    if epilogue not in GATED:
        return want, tolerance
    (gate, up), (gate_error, up_error) = want.chunk(2, -1), tolerance.chunk(2, -1)
    tolerance = 1.13 * gate_error * up.abs() + gate.abs() * up_error + product.error * (gate * up).abs() + 1e-6
    want = reference.gated(epilogue, want)
    return want, tolerance + ROUNDING["bf16"] * (want.abs() + tolerance)


def scaled(board: Board, rank: int, error: float, k: int, n: int, num_rows: int) -> None:
    """scaled_linear, STORE, ADD and gated: sums are scaled by a factor and, perhaps, by 1/rms of squares that are given."""
    epilogue = (Epilogue.STORE, Epilogue.ADD, *GATED)[int(board.rng.integers(2 + len(GATED)))]
    batch, _ = batch_of(board, rank, num_rows)
    product = Product(board, error, k, n, num_rows, epilogue in GATED)
    scale, rows = float(np.float32(board.rng.uniform(-2, 2))), product.rows
    factors, squares = torch.full((rows, 1), scale, dtype=torch.float64), None
    if product.eps is not None:
        parts = torch.rand(rows, int(board.rng.integers(1, 40)))
        factors = scale / (parts.double().sum(1, keepdim=True) / k + product.eps).sqrt()
        squares = board.fill(board.padded(rank, parts.shape[1], product.room), parts)
    product.want = reference.linear(factors * product.x.double(), product.weight, product.bias)
    magnitudes = reference.linear_scale(factors * product.x.double(), product.weight, product.bias)
    product.tolerance = 4 * error * magnitudes + 1e-6
    out = board.writable(
        board.padded(rank, n, product.room, dtype="bf16" if epilogue in GATED else "f32"), product.rows
    )
    old = torch.randn(rows, n)
    if epilogue is Epilogue.ADD:
        board.fill(out, old)
    out_bf16 = None
    if epilogue not in GATED:
        out_bf16 = board.writable(board.padded(rank, n, product.room, dtype="bf16"), rows)
    norm = InputNorm(board, rank, n, product.room, rows, out_bf16)
    what = f"scaled_linear {epilogue.name} k={k} n={n} rows={num_rows or 'one'} squares={squares and squares.cols}"
    task = ScaledLinear(
        rank,
        what,
        x=board.fill(board.padded(rank, k, product.room, dtype="bf16"), product.x),
        slab=board.matrix(rank, product.weight, product.paired),
        out=out,
        out_bf16=out_bf16,
        batch=batch,
        bias=board.vector(rank, product.bias),
        epilogue=epilogue,
        eps=product.eps or 0.0,
        scale=scale,
        x_squares=squares,
        **norm.operands,
    )
    board.graph.add(task)

    def check(memory: Memory) -> None:
        got = f32(memory, out, rows)
        assert_close("", got, *_after_epilogue(product, epilogue, old))
        norm.check(memory, got)

    board.expect(rank, "scaled_linear", what, check)


def push(board: Board, error: float, k: int, n: int, num_rows: int, make: type[Product] = Product) -> None:
    """PUSH: every rank's block in every rank's slots, and there their sum in rank order.

    One worker pushes and adds up: of what its own rank pushes, a sum that ends by what it has seen must know that it is done.
    """
    room, worker = n * MAX_ROWS, int(board.rng.integers(board.num_workers))
    slots = board.buffer(room * board.num_ranks, space=Space.HEAP, lamport=bool(board.rng.integers(2)))
    products, what = [], ""
    for rank in range(board.num_ranks):
        batch, _ = batch_of(board, rank, num_rows)
        product = make(board, error, k, n, num_rows)
        out = slots.at(rank, rank * room, rank * room + n * product.room)
        what = product.add(rank, out, Epilogue.PUSH, batch, worker=worker)
        products.append(product)
    for rank in range(board.num_ranks):
        blocks = tuple(slots.at(rank, r * room, r * room + n * product.room) for r in range(board.num_ranks))
        for block in blocks:
            board.writable(slots.at(rank, block.begin, block.begin + product.rows * n))
        _reduce(board, rank, worker, f"sum of {what}", blocks, products)


def _reduce(
    board: Board, rank: int, worker: int, what: str, blocks: tuple[Region, ...], products: list[Product]
) -> None:
    rows, n = products[0].rows, products[0].n
    batch, _ = batch_of(board, rank, products[0].num_rows)
    add = bool(board.rng.integers(2))
    old = torch.randn(rows, n) if add else torch.zeros(rows, n)
    dst, out_bf16 = (
        board.writable(board.padded(rank, n, products[0].room, dtype=dtype), rows) for dtype in ("f32", "bf16")
    )
    if add:
        board.fill(dst, old)
    polls = blocks[0].buffer.lamport
    task = Sum(
        rank, what, worker, blocks=blocks, dst=dst, out_bf16=out_bf16, batch=batch, accumulates=add, polls_blocks=polls
    )
    board.graph.add(task)

    def check(memory: Memory) -> None:
        total, tolerance = old.double(), torch.zeros(rows, n)
        for source, (block, product) in enumerate(zip(blocks, products, strict=True)):
            got = f32(memory, block)[0, : rows * n].reshape(rows, n)
            if polls:
                assert_close(f"block of rank {source}, reset ", got, torch.zeros(rows, n), 0)
                total, tolerance = total + product.want, tolerance + product.tolerance + 1e-6
            else:
                assert_close(f"block of rank {source} ", got, product.want, product.tolerance)
                total = (total.float() + torch.from_numpy(got.copy())).double()
        # Bit for bit where the blocks are known: float32 additions in the order of the ranks.
        assert_close("sum ", f32(memory, dst, rows), total, tolerance)
        summed = torch.from_numpy(f32(memory, dst, rows).copy())
        assert_close("rounded sum ", f32(memory, out_bf16, rows), summed.bfloat16().float(), 0)

    board.expect(rank, f"{products[0].kind} PUSH", what, check)


def random_softcap(board: Board, logits: torch.Tensor) -> float | None:
    """A softcap of about the size of the logits, or none."""
    if not logits.numel() or board.rng.random() < 0.3:
        return None
    return float(np.float32(board.rng.uniform(0.3, 3) * float(logits.abs().max()) + 0.1))


def cap_error(softcap: float | None) -> float:
    """Of 1 - 2 / (1 + e^2x), which float32 computes in steps of the size of 1."""
    return 1e-6 * (softcap or 0.0)


def argmax(board: Board, rank: int, error: float, k: int, n: int, num_rows: int, make: type[Product] = Product) -> None:
    """ARGMAX: one candidate a sampled row, and the logits of rows that need them, or of all that are sampled."""
    batch, row_table = batch_of(board, rank, num_rows)
    product = make(board, error, k, n, num_rows, biased=False)
    product.softcap = random_softcap(board, product.want)
    sampled = [row for row in range(product.rows) if row_table is None or row_table.rows[row].sample]
    out = board.writable(board.buffer(candidates_bytes(), dtype="u8").at(rank))
    logits = board.padded(rank, n, product.room) if board.rng.integers(2) else None
    keeps = bool(board.rng.integers(2))
    stored = [row for row in sampled if keeps or row_table is None or row_table.rows[row].sample >= RowSample.DRAW]
    for row in range(product.rows) if logits else ():
        if row in stored or (keeps and board.gpu_layout):  # the host twin leaves out rows that are not sampled
            board.writable(logits, first_row=row)
    what = product.add(rank, out, Epilogue.ARGMAX, batch, logits, keeps) + (" with logits" if logits else "")

    def check(memory: Memory) -> None:
        got, want, tolerance = memory[out.buffer].reshape(-1).view(CANDIDATE), product.want, product.tolerance
        having = [row for row in range(MAX_ROWS) if got[row]["token"] >= 0]
        assert having == sampled, f"candidates for rows {having}, expected {sampled}"
        for row in sampled:
            token = int(got[row]["token"]) - product.first_token
            assert 0 <= token < n, f"row {row}: token {token} of {n}"
            assert_close(f"value of row {row} ", got[row]["value"], want[row, token], tolerance[row, token])
            lead = float(want[row].max() - want[row, token])
            assert lead <= 2 * tolerance[row].max(), f"row {row}: token {token} is {lead} below the best"
            if logits and row in stored:
                stored_row = f32(memory, logits, product.rows)[row]
                capped = reference.softcap(want[row], product.softcap)
                assert_close(f"logits of row {row} ", stored_row, capped, tolerance[row] + cap_error(product.softcap))

    board.expect(rank, f"{make.kind} ARGMAX", what, check)


def rounding(board: Board, rank: int, num_rows: int, k: int) -> None:
    """Bit for bit: with the identity for weights, what is multiplied comes out; what is hard to round is."""
    batch, _ = batch_of(board, rank, num_rows)
    old, room = reference.hard_to_round(num_rows or 1, k), MAX_ROWS if num_rows else 1
    x, add = torch.randn(len(old), k).bfloat16(), bool(board.rng.integers(2))
    x = torch.zeros_like(x) if add else x
    given, out = board.fill(board.padded(rank, k, room, dtype="bf16"), x), board.padded(rank, k, room)
    if add:
        board.fill(out, old)
    out_bf16 = board.writable(board.padded(rank, k, room, dtype="bf16"), len(x))
    what = f"linear rounding k={k} rows={num_rows or 'one'} {'old' if add else 'x'}"
    slab, epilogue = board.matrix(rank, torch.eye(k).bfloat16()), Epilogue.ADD if add else Epilogue.STORE
    board.writable(out, len(x))
    board.graph.add(Linear(rank, what, x=given, slab=slab, out=out, out_bf16=out_bf16, batch=batch, epilogue=epilogue))
    want = old if add else x.float()

    def check(memory: Memory) -> None:
        assert_close("", f32(memory, out, len(x)), want, 0)
        assert_close("rounded ", f32(memory, out_bf16, len(x)), want.bfloat16().float(), 0)

    board.expect(rank, "linear rounding", what, check)


def ties(board: Board, rank: int) -> None:
    """Of equal logits the lowest id wins."""
    first_best = int(board.rng.integers(1, 40))
    n = first_best + int(board.rng.integers(1, 20))
    weight = torch.ones(n, 32).bfloat16()
    weight[:first_best] = -1
    out = board.writable(board.buffer(candidates_bytes(), dtype="u8").at(rank))
    x, slab = board.filled(rank, torch.ones(1, 32).bfloat16(), "bf16"), board.matrix(rank, weight)
    what = f"linear ties of {n} logits, from {first_best} on"
    board.graph.add(Linear(rank, what, x=x, slab=slab, out=out, epilogue=Epilogue.ARGMAX, first_token=7))

    def check(memory: Memory) -> None:
        got, want = memory[out.buffer].reshape(-1).view(CANDIDATE)[0].item(), (32.0, 7 + first_best)
        assert got == want, f"best of equal logits is {got}, expected {want}"

    board.expect(rank, "linear ARGMAX", what, check)


def batch_sizes(board: Board, rank: int, k: int, n: int) -> None:
    """A row's output does not depend on the other rows, so that a sequence gets the same tokens whatever shares its batch:
    equal bits for every number of rows.
    """
    x, weight = torch.randn(MAX_ROWS, k).bfloat16(), torch.randn(n, k).bfloat16()
    slab, outs = board.matrix(rank, weight), []
    for num_rows in range(1, MAX_ROWS + 1):
        batch, _ = batch_of(board, rank, num_rows)
        outs.append(board.writable(board.padded(rank, n, MAX_ROWS), num_rows))
        given = board.fill(board.padded(rank, k, MAX_ROWS, dtype="bf16"), x[:num_rows])
        what = f"linear of {num_rows} of {MAX_ROWS} rows, k={k} n={n}"
        board.graph.add(Linear(rank, what, x=given, slab=slab, out=outs[-1], batch=batch))

    def check(memory: Memory) -> None:
        whole = f32(memory, outs[-1], MAX_ROWS)
        for num_rows, out in enumerate(outs, 1):
            assert_close(f"{num_rows} rows ", f32(memory, out, num_rows), whole[:num_rows], 0)

    board.expect(rank, "linear batch sizes", f"linear of 1 to {MAX_ROWS} rows, k={k} n={n}", check)


def polls(board: Board, rank: int, error: float, k: int, n: int, num_rows: int, make: type[Product] = Product) -> None:
    """Two Lamport vectors by turns, each polled by a product while it is written; the task that writes one resets the other.

    One worker multiplies both: that it had waited for the first before the task in between, which polls nothing, tells it that
    the second vector was reset.
    """
    rows, room, worker = num_rows or 1, MAX_ROWS if num_rows else 1, int(board.rng.integers(board.num_workers))
    vectors = [board.buffer(k, room, "bf16", lamport=True) for _ in range(2)]
    for vector, other in zip(vectors, reversed(vectors), strict=True):
        batch, _ = batch_of(board, rank, num_rows)
        product = make(board, error, k, n, num_rows)
        product.x[:, :: int(board.rng.integers(2, 9))] = 0  # zeros are published, too
        block = board.buffer(k * room).at(rank)
        board.fill(block.buffer.at(rank, 0, k * rows), product.x.float().reshape(1, -1))
        board.graph.add(
            Sum(
                rank,
                f"vector of {k}",
                blocks=(block,),
                dst=board.writable(board.padded(rank, k, room), rows),
                out_bf16=board.writable(vector.at(rank), rows),
                lamport_reset=board.writable(other.at(rank), rows),
                batch=batch,
            )
        )
        out = board.writable(board.padded(rank, n, room), rows)
        what = product.add(rank, out, Epilogue.STORE, batch, x=vector.at(rank), worker=worker)
        board.graph.add(Nop(rank, f"between vectors of {k}", worker))

        def check(memory: Memory, out: Region = out, product: Product = product) -> None:
            assert_close("", f32(memory, out, rows), product.want, product.tolerance)

        board.expect(rank, f"{make.kind} polls", f"polled x of {what}", check)

    def check_vectors(memory: Memory) -> None:
        assert_close("reset ", f32(memory, vectors[0].at(rank), rows), torch.zeros(rows, k), 0)
        assert_close("", f32(memory, vectors[1].at(rank), rows), product.x.float(), 0)

    board.expect(rank, f"{make.kind} polls", f"vectors of {k} rows={num_rows}", check_vectors)
