"""What every rank of test_bodies.py runs: one launch with a case for every task body, checked against torch.

    python tests/support/bodies/job.py BACKEND SEED       (with tests/ and the repository on PYTHONPATH)

Rank 0 prints a JSON object a case: rank, what, error (null where it is right).
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from support.bodies.board import Board
from support.bodies.cases import CUDA, EMULATED, HOST, add_all

import distmk
from distmk.errors import DistmkError

SIZES = {"host": HOST, "emulated": EMULATED, "cuda": CUDA}
NUM_WORKERS = {"host": 3, "emulated": 8, "cuda": 16}


def main() -> int:
    backend, seed = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with distmk.connect() as bootstrap:
        board = Board(np.random.default_rng(seed), bootstrap.world_size, NUM_WORKERS[backend], backend != "host")
        add_all(board, SIZES[backend])
        try:
            with distmk.Session(board.graph, bootstrap, backend=backend) as session:
                mine = [(bootstrap.rank, what, error) for what, error in board.run(session, bootstrap.rank)]
                everyone = bootstrap.allgather(json.dumps(mine).encode())
        except DistmkError as error:
            print(f"rank {bootstrap.rank}: {type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code
        if bootstrap.rank == 0:
            for part in everyone:
                for rank, what, error in json.loads(part):
                    print(json.dumps({"rank": rank, "what": what, "error": error}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
