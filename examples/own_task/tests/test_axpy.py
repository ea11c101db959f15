"""The bodies of the task against its oracle, on the backends of this machine: the host twin, the emulator, a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from own_task import Axpy

import distmk
from distmk.testing import Build, compare_with_oracle


def ring(num_ranks: int, rng: np.random.Generator) -> distmk.Graph:
    """Ranks with two workers each. A rank adds twice, and copies the result to the next rank."""
    num = int(rng.integers(1, 3000))
    graph = distmk.Graph(num_ranks, num_workers=2)
    x, y, copied = (graph.buffer(name, num) for name in ("x", "y", "copied"))
    for rank in range(num_ranks):
        graph.add(Axpy(rank, "first", x=x.at(rank), y=y.at(rank), a=float(rng.normal())))
        to = copied.at((rank + 1) % num_ranks) if num_ranks > 1 else None
        graph.add(Axpy(rank, "second", x=x.at(rank), y=y.at(rank), copy=to, a=float(rng.normal())))
    return graph


def alone(rng: np.random.Generator) -> distmk.Graph:
    return ring(1, rng)


def pair(rng: np.random.Generator) -> distmk.Graph:
    return ring(2, rng)


@pytest.mark.parametrize("backend", ["host", "emulated", "cuda"])
@pytest.mark.parametrize(("build", "num_ranks"), [(alone, 1), (pair, 2)])
def test_bodies(backend: str, build: Build, num_ranks: int) -> None:
    if backend == "cuda" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    compare_with_oracle(build, backend=backend, num_ranks=num_ranks, num_iterations=3)


def test_regions_that_do_not_fit() -> None:
    graph = distmk.Graph(1)
    x, y = graph.buffer("x", 8), graph.buffer("y", 9)
    with pytest.raises(distmk.UsageError, match="the same number of columns"):
        Axpy(0, "axpy", x=x.at(0), y=y.at(0))
