"""The smallest program with a putmem_signal: a number travels round a ring of ranks, and each adds its own rank + 1.

python examples/ring.py --ranks 3        (or: mpirun -n 3 python examples/ring.py)
"""

from __future__ import annotations

import argparse
import sys

import distmk
from distmk.tasks import Affine, Put


def build(num_ranks: int) -> tuple[distmk.Graph, object]:
    """One iteration is one lap: rank r reads its inbox, adds r + 1, and puts the result into its neighbour's inbox."""
    graph = distmk.Graph(num_ranks)
    inbox, outbox = graph.buffer("inbox", 1), graph.buffer("outbox", 1)
    for rank in range(num_ranks):
        graph.add(Affine(rank=rank, op="add", src=inbox.at(rank), dst=outbox.at(rank), shift=rank + 1.0))
        graph.add(Put(rank=rank, op="pass_on", src=outbox.at(rank), dst=inbox.at((rank + 1) % num_ranks)))
    return graph, inbox


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--laps", type=int, default=100)
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    arguments = parser.parse_args()
    with distmk.connect(arguments.ranks, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
        graph, inbox = build(bootstrap.world_size)
        with distmk.Session(graph, bootstrap, backend=arguments.backend) as session:
            session.run(num_iterations=arguments.laps)  # one launch for all laps
            if bootstrap.rank == 0:
                total = float(session.view(inbox)[0, 0])
                expected = arguments.laps * sum(range(1, bootstrap.world_size + 1))
                where = f"{bootstrap.world_size} ranks on {session.backend_name}"
                print(f"{where}, {arguments.laps} laps: {total:g}, expected {expected}")
                return int(total != expected)
    return 0


if __name__ == "__main__":
    distmk.run_main(main)
