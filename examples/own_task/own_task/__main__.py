"""A number goes round a ring of ranks: each adds what it has to what comes, and passes the sum on.

python -m own_task --ranks 2        (or: mpirun -n 2 python -m own_task)
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import distmk
from own_task import Axpy


def build(num_ranks: int, num_elements: int) -> distmk.Graph:
    graph = distmk.Graph(num_ranks)
    x, y = graph.buffer("x", num_elements), graph.buffer("y", num_elements)
    for rank in range(num_ranks):
        nxt = y.at((rank + 1) % num_ranks) if rank + 1 < num_ranks else None
        graph.add(Axpy(rank, "axpy", x=x.at(rank), y=y.at(rank), copy=nxt, a=2.0))
    return graph


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--backend", default="host")
    arguments = parser.parse_args()
    with distmk.connect(arguments.ranks, follower_argv=[sys.executable, "-m", "own_task", *sys.argv[1:]]) as bootstrap:
        graph = build(bootstrap.world_size, 1000)
        with distmk.Session(graph, bootstrap, backend=arguments.backend) as session:
            session.view("x")[0] = bootstrap.rank + 1
            session.view("y")[0] = 0
            session.run()
            last = bootstrap.rank + 1 == bootstrap.world_size
            if bootstrap.rank == 0:
                print(session.view("y")[0,:4])
    return 0


if __name__ == "__main__":
    sys.exit(main())
