"""Each rank adds a multiple of x to y, lap by lap, and adds up the y of the previous rank.

python -m own_task --ranks 2        (or: mpirun -n 2 python -m own_task)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import distmk
from distmk import trace
from own_task import Axpy

NUM_ELEMENTS = 1000


def build(num_ranks: int) -> distmk.Graph:
    """The tasks of one lap. Waits, also those between ranks and laps, follow from what tasks read and write."""
    graph = distmk.Graph(num_ranks)
    x, y, inbox, total = (graph.buffer(name, NUM_ELEMENTS) for name in ("x", "y", "inbox", "total"))
    for rank in range(num_ranks):
        copy = inbox.at((rank + 1) % num_ranks) if num_ranks > 1 else None
        graph.add(Axpy(rank, "add", x=x.at(rank), y=y.at(rank), copy=copy, a=0.5))
    for rank in range(num_ranks):
        source = inbox if num_ranks > 1 else y
        graph.add(Axpy(rank, "add_up", x=source.at(rank), y=total.at(rank)))
    return graph


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--laps", type=int, default=10)
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    parser.add_argument("--trace", type=Path, help="a file for distmk trace")
    arguments = parser.parse_args()
    follower = [sys.executable, "-m", "own_task", *sys.argv[1:]]
    with (
        distmk.connect(arguments.ranks, follower_argv=follower) as bootstrap,
        distmk.Session(build(bootstrap.world_size), bootstrap, backend=arguments.backend) as session,
    ):
        session.write("x", bootstrap.rank + 1)
        recorded = session.run_traced(arguments.laps)
        if bootstrap.rank == 0 and recorded is not None:
            num_ranks, laps = bootstrap.world_size, arguments.laps
            expected = 0.5 * num_ranks * laps * (laps + 1) / 2  # the x of the last rank is the number of ranks
            print(f"{num_ranks} ranks, {laps} laps: {session.view('total')[0, -1]:g}, expected {expected:g}")
            if arguments.trace:
                trace.write(recorded, arguments.trace)
    return 0


if __name__ == "__main__":
    distmk.run_main(main)
