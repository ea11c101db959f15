"""The backend and sizes that a user's task graph is built for, so that one script runs on any backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distmk.backends.defaults import agree_on_backend, agree_on_workers, backend_choices
from distmk.bootstrap import Bootstrap
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.partition import partition_rows
from distmk.graph.regions import Slab, Tiling
from distmk.model.bf16 import U16, torch_to_bf16

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Target:
    """A backend, and the sizes that a graph depends on: the number of ranks and of workers per rank."""

    backend: str  # host, cuda or emulated
    num_ranks: int
    num_workers: int

    def graph(self) -> Graph:
        """An empty graph for these ranks and workers."""
        return Graph(self.num_ranks, self.num_workers)

    def matrix(self, graph: Graph, name: str, rank: int, matrix: torch.Tensor | U16) -> list[Slab]:
        """Add a matrix of one rank, bf16 [n, k], for `Linear` tasks. It is packed in tiles if the backend streams tiles.

        `matrix`: a torch tensor, or its bits in an array. Returns slabs of consecutive rows that cover the matrix: one
        for each worker, or fewer if it is small. UsageError: it is not bf16 [n, k].
        """
        rows = _bits(name, matrix)
        num_rows, num_cols = rows.shape
        slabs = partition_rows(num_rows, num_cols, self.num_workers).ranges
        is_tiled = backend_choices(self.backend)["tiled"]
        whole = graph.constant(name, rank, rows, Tiling(slabs) if is_tiled else None)
        return [Slab(whole.weight, begin, end) for begin, end in slabs]


def choose_target(bootstrap: Bootstrap, backend: str | None = "auto", num_workers: int | None = None) -> Target:
    """The target for a backend, chosen as `Session` and `LLM` do, and for `num_workers` of a rank. Collective.

    num_workers None: one for each SM of a GPU, or for each core that a rank has on the host. UsageError on every rank:
    the backend cannot run here, or the ranks choose different ones.
    """
    name = agree_on_backend(bootstrap, backend)
    return Target(name, bootstrap.world_size, agree_on_workers(bootstrap, num_workers, name))


def _bits(name: str, matrix: Any) -> U16:
    """The bits of a bf16 matrix, uint16 [n, k]."""
    bits, dtype = matrix, getattr(matrix, "dtype", type(matrix).__name__)
    if str(dtype) == "torch.bfloat16":
        bits = torch_to_bf16(matrix)
    if not isinstance(bits, np.ndarray) or bits.dtype != np.uint16 or bits.ndim != 2:
        shape = list(getattr(matrix, "shape", ()))
        raise UsageError(
            f"matrix {name} is {dtype} {shape}; expected bf16 [n, k], as a torch tensor or as its bits in a uint16 array"
        )
    return bits
