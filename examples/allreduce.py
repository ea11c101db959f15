"""All-reduce as tasks: every rank puts its vector into all ranks' slots, each adds the slots up in rank order.

python examples/allreduce.py --ranks 4   (or: torchrun --nproc-per-node 4 examples/allreduce.py)
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import distmk
from distmk.graph.regions import Buffer
from distmk.tasks import Put, Sum


def build(num_ranks: int, num_elements: int) -> tuple[distmk.Graph, Buffer]:
    """`vector` [num_elements] float32 on every rank becomes the sum over ranks; waits follow from what tasks touch."""
    graph = distmk.Graph(num_ranks)
    vector = graph.buffer("vector", num_elements)
    slots = graph.buffer("slots", num_ranks * num_elements)
    for rank in range(num_ranks):
        begin = rank * num_elements
        for peer in range(num_ranks):
            slot = slots.at(peer, begin, begin + num_elements)
            graph.add(Put(rank=rank, op=f"put_to_{peer}", src=vector.at(rank), dst=slot))
    for rank in range(num_ranks):
        blocks = tuple(slots.at(rank, i * num_elements, (i + 1) * num_elements) for i in range(num_ranks))
        graph.add(Sum(rank=rank, op="reduce", blocks=blocks, dst=vector.at(rank)))
    return graph, vector


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--elements", type=int, default=4096)
    arguments = parser.parse_args()
    with distmk.connect(arguments.ranks, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
        num_ranks = bootstrap.world_size
        graph, vector = build(num_ranks, arguments.elements)
        with distmk.Session(graph, bootstrap) as session:
            inputs = [np.random.default_rng(rank).standard_normal(arguments.elements) for rank in range(num_ranks)]
            session.view(vector)[0] = inputs[bootstrap.rank].astype(np.float32)
            session.run()
            expected = np.sum([x.astype(np.float32) for x in inputs], axis=0, dtype=np.float64)
            error = float(np.abs(session.view(vector)[0] - expected).max())
            print(f"rank {bootstrap.rank}: largest error {error:.2e}")
            return int(error > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
