"""All-reduce as tasks: every rank puts its vector into all ranks' slots; each rank adds up the slots in rank order.

python examples/allreduce.py --ranks 4   (or: torchrun --nproc-per-node 4 examples/allreduce.py)
"""

from __future__ import annotations

import argparse
import itertools
import sys

import numpy as np

import distmk
from distmk.graph.regions import Buffer
from distmk.tasks import Put, Sum

MIN_PART = 1024  # elements that are worth a task


def build(target: distmk.Target, num_elements: int) -> tuple[distmk.Graph, Buffer]:
    """`vector` [num_elements] float32 on every rank becomes the sum over ranks.

    Waits follow from what tasks read and write.

    Each worker of a rank handles one part of the elements.
    """
    graph, ranks = target.graph(), range(target.num_ranks)
    vector = graph.buffer("vector", num_elements)
    slots = graph.buffer("slots", target.num_ranks * num_elements)
    num_parts = min(target.num_workers, max(1, num_elements // MIN_PART))
    bounds = [num_elements * part // num_parts for part in range(num_parts + 1)]
    for worker, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for rank, peer in itertools.product(ranks, ranks):
            slot = slots.at(peer, rank * num_elements + begin, rank * num_elements + end)
            graph.add(Put(rank, f"put_to_{peer}", worker, src=vector.at(rank, begin, end), dst=slot))
        for rank in ranks:
            blocks = tuple(slots.at(rank, i * num_elements + begin, i * num_elements + end) for i in ranks)
            graph.add(Sum(rank, "reduce", worker, blocks=blocks, dst=vector.at(rank, begin, end)))
    return graph, vector


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    arguments = parser.parse_args()
    with distmk.connect(arguments.ranks, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
        target = distmk.choose_target(bootstrap, arguments.backend)
        graph, vector = build(target, arguments.elements)
        with distmk.Session(graph, bootstrap, backend=target.backend) as session:
            inputs = np.random.default_rng(0).standard_normal((target.num_ranks, arguments.elements), np.float32)
            session.write(vector, inputs[bootstrap.rank])  # into the memory that the tasks use, on the GPU or the host
            session.run()
            error = np.abs(session.view(vector)[0] - inputs.sum(axis=0, dtype=np.float64)).max()
            print(f"rank {bootstrap.rank} on {session.backend_name}: largest error {error:.2e}")
            return int(not error <= 1e-5)


if __name__ == "__main__":
    distmk.run_main(main)
