"""Every task body against torch, as one launch of a graph through the public Session: shapes fresh every run.

python -m pytest -q tests/tasks/test_bodies.py                     # all that this machine can run
python -m pytest -q tests/tasks/test_bodies.py -k cuda             # on GPUs only: about 30 s for 1 and 2 ranks
DISTMK_TEST_SEED=7 python -m pytest -q tests/tasks/test_bodies.py  # the shapes of one run again
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.bodies.board import Board
from support.bodies.cases import CUDA, add_all
from support.helpers import ROOT, Runner
from support.machine import FAR, command, on, require, run_job

from distmk.check import check
from distmk.program.program import compile_graph

JOB = ROOT / "tests" / "support" / "bodies" / "job.py"
BODIES = ("linear STORE", "linear ADD", "linear SWIGLU", "linear PUSH", "linear ARGMAX", "linear rounding", "linear ties",
          "embed STORE", "embed PUSH", "put and affine", "put of", "sine of", "sum of", "sample of", "attention")  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "num_ranks", "nodes"),
    [
        on("host", 1, {}),
        on("host", 3, {}),
        on("emulated", 1, {}),
        on("emulated", 2, {}),
        on("emulated", 2, FAR),
        on("cuda", 1, {}),
        on("cuda", 2, {}, num_ranks=2),
        on("cuda", 2, FAR, num_ranks=2),
        on("cuda", 4, {}, num_ranks=4),
    ],
)
def test_bodies(runner: Runner, backend: str, num_ranks: int, nodes: dict[str, str]) -> None:
    require(backend, num_ranks)
    seed = os.environ.get("DISTMK_TEST_SEED") or str(int.from_bytes(os.urandom(4), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    done = run_job(runner, command(JOB, backend, seed, num_ranks=num_ranks), **nodes)
    results = done.objects()
    for body in BODIES:
        for rank in range(num_ranks):
            # What a task of one rank did may show on another.
            shown = [each["what"] for each in results if each["rank"] == rank or f"on rank {rank}" in each["what"]]
            assert any(body in what for what in shown), f"rank {rank} ran no {body}"
    wrong = [f"rank {each['rank']} {each['what']}: {each['error']}" for each in results if each["error"]]
    print(f"{len(results)} checks")
    assert not wrong, f"{len(wrong)} of {len(results)} checks failed\n" + "\n".join(wrong[:12])


def test_the_board_for_gpus_is_a_correct_program() -> None:
    """What only a GPU can run is at least compiled and proved here."""
    rng = np.random.default_rng(1)
    for num_ranks in (1, 2):
        board = Board(rng, num_ranks, num_workers=16, tiled=True)
        add_all(board, CUDA)
        check(compile_graph(board.graph))
