"""A linear layer with tensor parallelism: every rank multiplies its columns of W, and pushes its part of W x to all. Needs torch.

python examples/linear.py --ranks 2   (or: torchrun --nproc-per-node 2 examples/linear.py)
"""

from __future__ import annotations

import argparse
import sys

import torch

import distmk
from distmk.abi import Epilogue
from distmk.graph.regions import Buffer
from distmk.tasks import Linear, Sum


def build(target: distmk.Target, weight: torch.Tensor) -> tuple[distmk.Graph, Buffer, Buffer]:
    """y = W x of `weight`, bf16 [n, k]: rank r has x and the columns of W from r * k / ranks on, and gets all of y."""
    graph, ranks, (n, k) = target.graph(), range(target.num_ranks), weight.shape
    x, y = graph.buffer("x", k // target.num_ranks, dtype="bf16"), graph.buffer("y", n)
    slots = graph.buffer("slots", target.num_ranks * n)  # the parts that all ranks have computed
    for rank, columns in zip(ranks, weight.chunk(target.num_ranks, dim=1), strict=True):
        # Slabs of rows, one for each worker that gets some; packed as the backend streams them.
        slabs = target.matrix(graph, "weight", rank, columns)
        for worker, slab in enumerate(slabs):
            slot = slots.at(rank, rank * n + slab.row_begin, rank * n + slab.row_end)
            to_all = {"out": slot, "epilogue": Epilogue.PUSH, "num_ranks": target.num_ranks}
            graph.add(Linear(rank, "multiply", worker, x=x.at(rank), slab=slab, **to_all))
    for rank in ranks:
        for worker, slab in enumerate(slabs):
            blocks = tuple(slots.at(rank, i * n + slab.row_begin, i * n + slab.row_end) for i in ranks)
            graph.add(Sum(rank, "reduce", worker, blocks=blocks, dst=y.at(rank, slab.row_begin, slab.row_end)))
    return graph, x, y


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--size", type=int, default=512, help="rows of the matrix, and columns of a rank")
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    arguments = parser.parse_args()
    with distmk.connect(arguments.ranks, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
        target = distmk.choose_target(bootstrap, arguments.backend)
        torch.manual_seed(0)  # the same numbers on every rank
        num_cols = arguments.size * target.num_ranks
        weight, vector = torch.randn(arguments.size, num_cols).bfloat16(), torch.randn(num_cols).bfloat16()
        graph, x, y = build(target, weight)
        with distmk.Session(graph, bootstrap, backend=target.backend) as session:
            session.tensor(x)[0] = vector.chunk(target.num_ranks)[bootstrap.rank]
            session.run()
            wanted = weight.double() @ vector.double()
            error = float((session.tensor(y)[0].cpu() - wanted).norm() / wanted.norm())
            where = f"rank {bootstrap.rank} of {target.num_ranks} on {session.backend_name}"
            print(f"{where}, {target.num_workers} workers: relative error {error:.1e}")
            return int(not error <= 1e-5)


if __name__ == "__main__":
    distmk.run_main(main)
