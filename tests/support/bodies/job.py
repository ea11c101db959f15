"""What every rank of test_bodies.py runs: a launch with a case for every task body, checked against torch.

    python tests/support/bodies/job.py BACKEND SEED PART     (with tests/ and the repository on PYTHONPATH)

PART: "plain" or "packed", for the boards of one of the two kernels.

Rank 0 prints a JSON object for each `board.Result` of every rank.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from support import jobs
from support.bodies.board import Board, Result
from support.bodies.cases import CUDA, EMULATED, HOST, add_all, add_jobs, add_packed, add_packed_jobs

import distmk
from distmk import env

SIZES = {"host": HOST, "emulated": EMULATED, "cuda": CUDA}
NUM_WORKERS = {"host": 3, "emulated": 8, "cuda": 16}


def main() -> None:
    backend, seed, part = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with distmk.connect() as bootstrap:
        own: list[Result] = []
        # Ranks that no pointer reaches run no job iterations.
        plain = [add_all] if env.virtual_node_size() else [add_all, add_jobs]
        packed = [add_packed] if env.virtual_node_size() else [add_packed, add_packed_jobs]
        for add in packed if part == "packed" else plain:
            board = Board(np.random.default_rng(seed), bootstrap.world_size, NUM_WORKERS[backend], backend != "host")
            add(board, SIZES[backend])
            proved = bootstrap.rank > 0  # rank 0 proves the program for all: they agree that it is the same
            with distmk.Session(board.compile(), bootstrap, backend=backend, proved=proved) as session:
                own += board.run(session)
        everyone = bootstrap.allgather(json.dumps([result._asdict() for result in own]).encode())
        if bootstrap.rank == 0:
            for part in everyone:
                for result in json.loads(part):
                    print(json.dumps(result))


if __name__ == "__main__":
    jobs.run(main)
