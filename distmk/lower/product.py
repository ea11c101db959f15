"""A matrix product on each rank, in parts of one weight format, and the tasks of its slabs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from distmk.abi import Epilogue
from distmk.graph.partition import Partition
from distmk.graph.regions import Region, Slab, Weight
from distmk.lower.plan import WorkPlan
from distmk.model.shards import Range
from distmk.tasks import Linear, PackedLinear, ScaledLinear


class Part(NamedTuple):
    """Rows of a rank's matrix that have one weight format, from row `begin` of the matrix on.

    order: of the columns, if the format has one; see `ScaledLinear`.
    """

    weight: Weight
    begin: int
    order: Slab | None = None

    @property
    def rows(self) -> Range:
        return self.begin, self.begin + self.weight.rows


@dataclass(frozen=True)
class Product:
    """epilogue(x @ weight.T + bias) on each rank, with the rank's own matrix.

    If `applies_rms`, x / rms(x) takes the place of x.

    Tuples are by rank.
    parts: consecutive rows of the matrix. Their formats may differ, as of q, k and v; a gated product has one part.
    biases: f32; None: no bias.
    partitions: rows of the matrix, by slab.
    scale: a factor of x @ weight.T that is folded into the bias but not into the matrix.
    norms: f32, the weight of the norm before the product, for parts that it is not folded into; empty if all contain it.
    """

    name: str
    parts: tuple[tuple[Part, ...], ...]
    biases: tuple[Slab | None, ...]
    partitions: tuple[Partition, ...]
    epilogue: Epilogue = Epilogue.STORE
    applies_rms: bool = False
    scale: float = 1.0
    norms: tuple[Slab | None, ...] = ()

    def runs(self, rank: int, rows: Range | None = None) -> list[Range]:
        """The rows of a rank's matrix (None: all) as ranges of one part each."""
        begin, end = rows or (0, self.parts[rank][-1].rows[1])
        ranges = [(max(begin, part.rows[0]), min(end, part.rows[1])) for part in self.parts[rank]]
        return [(first, last) for first, last in ranges if first < last]

    def part_of(self, rank: int, row: int) -> Part:
        """The part that has a row of a rank's matrix."""
        return next(part for part in self.parts[rank] if part.rows[0] <= row < part.rows[1])

    def operands(self, rank: int, rows: Range) -> dict[str, Slab | None]:
        """Rows of one part, their biases, and the order of their columns."""
        part = self.part_of(rank, rows[0])
        slab, bias = Slab(part.weight, rows[0] - part.begin, rows[1] - part.begin), self.biases[rank]
        return {"slab": slab, "bias": bias and Slab(bias.weight, *rows), "order": part.order}


def slab_task(
    plan: WorkPlan, product: Product, rank: int, rows: Range, *, x_squares: Region | None = None, **operands: Any
) -> Linear:
    """The task of `rows` of one part of a rank's matrix.

    x_squares: of x, if the norm's weight is not folded into the matrix.
    """
    operands |= {"rank": rank, "op": product.name, **product.operands(rank, rows)}
    if plan.options.folds_factors:
        del operands["order"]  # no format that GPUs multiply has one
        operands["applies_rms"] = product.applies_rms
        if operands["slab"].weight.format.folds_factors:
            return Linear(**operands)
        return PackedLinear(**operands, norm=product.norms[rank] if product.norms else None, scale=product.scale)
    return ScaledLinear(**operands, scale=product.scale, x_squares=x_squares)
