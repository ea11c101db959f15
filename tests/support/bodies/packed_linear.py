"""Products of packed weights, for the cases of linear tasks."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from support.bodies.board import Board
from support.bodies.linear import Product

from distmk.abi import GATED, Epilogue
from distmk.formats import QuantizedRows, WeightFormat
from distmk.formats.gguf_blocks import GgufBlocks
from distmk.formats.int4_groups import Int4Groups
from distmk.formats.packed_tiles import PackedTiles
from distmk.graph.regions import Region
from distmk.tasks import PackedLinear


def random_rows(
    found: type[WeightFormat], num_rows: int, num_cols: int, rng: np.random.Generator
) -> tuple[QuantizedRows, torch.Tensor]:
    """Rows of any codes, and the magnitudes that their decoding adds up."""
    if issubclass(found, GgufBlocks):
        return _random_blocks(found, num_rows, num_cols, rng)
    groups = 1 if found.group_cols == 1 else -(-num_cols // found.group_cols)
    scales = (rng.uniform(0.2, 1, (num_rows, groups)) * rng.choice([-1, 1], (num_rows, groups))).astype(np.float16)
    codes = rng.integers(0, 256, (num_rows, num_cols)).astype(np.uint8)
    if issubclass(found, Int4Groups):
        zeros = rng.integers(0, 17, scales.shape).astype(np.uint8)
        rows = QuantizedRows(codes % 16, scales.astype(np.float32), zeros)
        largest = rows._replace(codes=rows.codes + np.repeat(zeros, found.group_cols, 1)[:, :num_cols], zeros=0 * zeros)
        return rows, torch.from_numpy(np.abs(found.values(largest)))
    codes[codes & 127 == 127] = 0  # NaN
    rows = QuantizedRows(codes, scales.astype(np.float32) / 300, np.empty((num_rows, 0), np.uint8))
    return rows, torch.from_numpy(np.abs(found.values(rows)))


def _random_blocks(
    found: type[GgufBlocks], num_rows: int, num_cols: int, rng: np.random.Generator
) -> tuple[QuantizedRows, torch.Tensor]:
    shape = (num_rows, num_cols // found.group_cols, found.block_bytes)
    blocks = rng.integers(0, 256, shape).astype(np.uint8)
    if found.group_cols == 256:  # no scale of a group is 0
        blocks[..., slice(192, 208) if found.name == "q6_k" else slice(4, 16)] |= 1
    magnitudes = blocks.copy()
    for number, at in enumerate(found.half_offsets):
        halves = (rng.uniform(0.2, 1, shape[:2]) * rng.choice([-1, 1], shape[:2]) / 128).astype(np.float16)
        # Minima are subtracted if scales are integers, else added.
        signed = np.abs(halves) * (-1 if number and found.group_cols == 256 else 1)
        for target, values in ((blocks, halves), (magnitudes, signed)):
            target[..., at : at + 2] = values[..., None].view(np.uint8)
    rows, largest = (QuantizedRows.of_blocks(part.reshape(num_rows, -1)) for part in (blocks, magnitudes))
    return rows, torch.from_numpy(np.abs(found.values(largest)))


class PackedProduct(Product):
    """The inputs of a packed_linear task, of a format drawn at random from `formats`."""

    kind = "packed_linear"
    formats: tuple[type[PackedTiles], ...] = ()

    def __init__(
        self, board: Board, error: float, k: int, n: int, num_rows: int, paired: bool = False, biased: bool = True
    ):
        super().__init__(board, error, k, n, num_rows, paired, biased)
        rng = board.rng
        self.found = self.formats[int(rng.integers(len(self.formats)))]
        most = self.found.group_cols - 1
        self.lead = int(rng.choice([0, 0, min(8, most), most // 2 // 8 * 8, most // 3]))
        self.tail = int(rng.integers(0, most + 1))
        if issubclass(self.found, GgufBlocks):  # rows are whole blocks
            self.tail = -(self.lead + k) % self.found.group_cols
        self.quantized, magnitudes = random_rows(self.found, len(self.weight), self.lead + k + self.tail, rng)
        cols = slice(self.lead, self.lead + k)
        self.weight, self.magnitudes = torch.from_numpy(self.found.values(self.quantized))[:, cols], magnitudes[:, cols]
        self.norm = torch.rand(k) + 0.5 if rng.random() < 0.5 else None
        self.scale = float(np.float32(rng.uniform(-2, 2))) if rng.random() < 0.3 else 1.0

    def _linear(self, magnitudes: bool) -> torch.Tensor:
        """The output, or the sum of the magnitudes that the task adds up."""
        x = self.x if self.norm is None else (self.x.float() * self.norm).bfloat16()
        factors = torch.full((len(x), 1), self.scale, dtype=torch.float64)
        if self.eps is not None:
            factors /= (self.x.double().square().mean(1, keepdim=True) + self.eps).sqrt()
        x, weight, bias = factors * x.double(), self.weight, self.bias
        if magnitudes:
            x, weight, bias = x.abs(), self.magnitudes, None if bias is None else bias.abs()
        return F.linear(x, weight.double(), None if bias is None else bias.double())

    @cached_property
    def want(self) -> torch.Tensor:
        return self._linear(magnitudes=False)

    @cached_property
    def tolerance(self) -> torch.Tensor:
        return self.error * self._linear(magnitudes=True) + 1e-6

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
        board, given = self.board, [name for name in ("eps", "bias", "norm") if getattr(self, name) is not None]
        shape = f"k={self.lead}+{self.k}+{self.tail} n={self.n} rows={self.num_rows or 'one'}"
        what = (
            f"packed_linear {self.found.name} {epilogue.name} {shape} scale={self.scale:.3g} {' '.join(given)}".strip()
        )
        task = PackedLinear(
            rank,
            what,
            worker,
            x=x or board.fill(board.padded(rank, self.k, self.room, dtype="bf16"), self.x),
            slab=board.packed_matrix(rank, self.found, self.quantized, self.lead, self.tail, epilogue in GATED),
            out=out,
            out_bf16=out_bf16,
            batch=batch,
            bias=board.vector(rank, self.bias),
            norm=board.vector(rank, self.norm),
            scale=self.scale,
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


def product_of(*formats: type[PackedTiles]) -> type[PackedProduct]:
    """A class of products whose weights have one of these formats."""
    return type("Packed", (PackedProduct,), {"formats": formats})
