"""A linear layer with tensor parallelism: every rank multiplies its columns of W and pushes its part of W x to all.

python examples/linear.py --ranks 2   (or: torchrun --nproc-per-node 2 examples/linear.py)
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import distmk
from distmk.abi import Epilogue
from distmk.graph.regions import Buffer
from distmk.model.bf16 import U16, bf16_to_f32, f32_to_bf16
from distmk.tasks import Linear, Sum


def build(target: distmk.Target, weight: U16) -> tuple[distmk.Graph, Buffer, Buffer]:
    """y = W x, where `weight` has the bits of W, bf16 [n, k].

    Rank r has x and the columns of W beginning at r * k / ranks; every rank gets all of y.
    """
    graph, ranks, (n, k) = target.graph(), range(target.num_ranks), weight.shape
    x, y = graph.buffer("x", k // target.num_ranks, dtype="bf16"), graph.buffer("y", n)
    slots = graph.buffer("slots", target.num_ranks * n)  # the parts that all ranks have computed
    for rank, columns in zip(ranks, np.split(weight, target.num_ranks, axis=1), strict=True):
        # Slabs of rows, one for each worker that gets rows; packed in the order in which the backend streams them.
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
        rng = np.random.default_rng(0)  # the same numbers on every rank
        num_cols = arguments.size * target.num_ranks
        shapes = (arguments.size, num_cols), num_cols
        weight, vector = (f32_to_bf16(rng.standard_normal(shape, np.float32)) for shape in shapes)
        graph, x, y = build(target, weight)
        with distmk.Session(graph, bootstrap, backend=target.backend) as session:
            session.write(x, np.split(vector, target.num_ranks)[bootstrap.rank])
            session.run()
            wanted = bf16_to_f32(weight).astype(np.float64) @ bf16_to_f32(vector)
            error = np.linalg.norm(session.view(y)[0] - wanted) / np.linalg.norm(wanted)
            where = f"rank {bootstrap.rank} of {target.num_ranks} on {session.backend_name}"
            print(f"{where}, {target.num_workers} workers: relative error {error:.1e}")
            return int(not error <= 1e-5)


if __name__ == "__main__":
    distmk.run_main(main)
