"""The bodies of the task against its oracle, on what this machine has: the host twin, and the emulator of the GPU's kernel."""

from __future__ import annotations

import numpy as np
import pytest
from own_task import Axpy

import distmk
from distmk.testing import compare_with_oracle


def pair(rng: np.random.Generator) -> distmk.Graph:
    """Two ranks of two workers; each adds twice, and copies to the other rank what it then has."""
    num = int(rng.integers(1, 3000))
    graph = distmk.Graph(2, num_workers=2)
    x, y, copied = (graph.buffer(name, num) for name in ("x", "y", "copied"))
    for rank in range(2):
        graph.add(Axpy(rank, "first", x=x.at(rank), y=y.at(rank), a=float(rng.normal())))
        to = copied.at(1 - rank)
        graph.add(Axpy(rank, "second", x=x.at(rank), y=y.at(rank), copy=to, a=float(rng.normal())))
    return graph


@pytest.mark.parametrize("backend", ["host", "emulated"])
def test_bodies(backend: str) -> None:
    compare_with_oracle(pair, backend=backend, num_ranks=2, num_iterations=3)


def test_regions_that_do_not_fit() -> None:
    graph = distmk.Graph(1)
    x, y = graph.buffer("x", 8), graph.buffer("y", 9)
    with pytest.raises(distmk.UsageError, match="the same number of columns"):
        Axpy(0, "axpy", x=x.at(0), y=y.at(0))
