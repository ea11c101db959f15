"""The buffers of attention's partial results. Layers with different windows have different splits, and so different buffers."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region
from distmk.lower.plan import WorkPlan
from distmk.lower.rotating import RotatingBuffers, Rotation
from distmk.tasks.splits import ANY_LENGTH


@dataclass(frozen=True)
class AttentionPartials:
    """Partial results of one layer's attention.

    of_splits: f32 (`AttentionShape.num_partials`), the same buffer for all layers with this layer's window.
    index: of the layer among the layers with its window.
    rotating: bf16, partials of a single row (`AttentionShape.fused_partial_cols`), by index; None without a fused
      combine.
    """

    of_splits: Buffer
    index: int
    rotating: RotatingBuffers | None

    @property
    def fused(self) -> Buffer | None:
        """A single row's partial results, which the o projection combines; None without a fused combine."""
        return self.rotating.at(self.index) if self.rotating else None

    def reset(self, rank: int, cols: int) -> Region | None:
        """The columns of an earlier layer's `fused` that attention resets; None without a fused combine."""
        return self.rotating.reset_at(self.index, rank, 0, cols) if self.rotating else None


def declare_partials(graph: Graph, plan: WorkPlan) -> tuple[AttentionPartials, ...]:
    """Add the partials of all layers to `graph`."""
    num_floats = max(shape.num_partials for shape in plan.shapes)
    fused_cols = max(shape.fused_partial_cols for shape in plan.shapes)
    of_window: dict[int, tuple[Buffer, RotatingBuffers | None]] = {}
    for window in dict.fromkeys(plan.windows):
        suffix = "" if window == ANY_LENGTH else f"_window{window}"
        rotation = Rotation(plan.windows.count(window))
        of_window[window] = (
            graph.buffer(f"attention_partials{suffix}", num_floats, lamport=True),
            RotatingBuffers.declare(graph, f"attention_fused_partials{suffix}", fused_cols, rotation, rows=1)
            if plan.fuses_combine
            else None,
        )
    indices = (plan.windows[:layer].count(window) for layer, window in enumerate(plan.windows))
    return tuple(
        AttentionPartials(of_window[window][0], index, of_window[window][1])
        for window, index in zip(plan.windows, indices, strict=True)
    )
