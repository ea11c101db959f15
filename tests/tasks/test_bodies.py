"""Every task body against torch, as one launch of a graph through the public Session: shapes fresh every run.

python -m pytest -q tests/tasks/test_bodies.py                     # all backends that this machine has
python -m pytest -q tests/tasks/test_bodies.py -k cuda             # on GPUs only: about 30 s for 1 and 2 ranks
DISTMK_TEST_SEED=7 python -m pytest -q tests/tasks/test_bodies.py  # the shapes of one run again
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.batches import make_batch, random_runs
from support.bodies.board import Board
from support.bodies.cases import CUDA, KINDS, KINDS_BETWEEN_RANKS, add_all, add_jobs, add_packed
from support.bodies.linear import CANDIDATE
from support.helpers import ROOT, Runner
from support.machine import FAR, command, on, on_nodes, require, run_job

from distmk.abi import MAX_ROWS, Batch, Candidate
from distmk.check import check

JOB = ROOT / "tests" / "support" / "bodies" / "job.py"
RUNS = [
    on_nodes("host", 1, fast=True),
    on_nodes("host", 3),
    on("host", 1, {"DISTMK_AMX": "0"}, num_ranks=1, id="host-1-without-amx"),
    *(on_nodes("emulated", num_ranks) for num_ranks in (1, 2)),
    on_nodes("emulated", 2, FAR),
    *(on_nodes("cuda", num_ranks) for num_ranks in (1, 2)),
    on_nodes("cuda", 2, FAR),
    on_nodes("cuda", 4),
]
OF_JOBS = (
    "linear_jobs", "append_kv", "attention_jobs", "embed_rows", "reduce_rows", "select_rows", "argmax_rows"
)  # fmt: skip


@dataclass
class Run:
    """Results of a launch of all cases, as `board.Result` has them."""

    num_ranks: int
    seed: str
    results: list[dict[str, Any]]

    def check(self, kind: str) -> None:
        """Fail where a body of this kind went wrong, or no rank ran one."""
        print(f"repeat with DISTMK_TEST_SEED={self.seed}")
        found = [each for each in self.results if each["kind"] == kind]
        assert found, f"no rank ran {kind}"
        wrong = [f"rank {each['rank']} {each['what']}: {each['error']}" for each in found if each["error"]]
        assert not wrong, f"{len(wrong)} of {len(found)} checks failed\n" + "\n".join(wrong[:12])


launched: dict[str, Run] = {}


@pytest.fixture
def run(
    runner: Runner, backend: str, num_ranks: int, nodes: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Run]:
    """The boards that a test looks at: of its kind, or all. They are run once a backend and number of ranks."""
    require(backend, num_ranks)
    kind = request.node.callspec.params.get("kind")
    if backend == "host" and kind and kind.startswith("packed"):
        pytest.skip("it has no body there")
    if kind:
        parts = ["packed" if kind.startswith("packed") else "plain"]
    else:
        parts = ["plain"] if backend == "host" else ["plain", "packed"]
    seed = os.environ.get("DISTMK_TEST_SEED") or str(int.from_bytes(os.urandom(4), "little"))
    for part in parts:
        name = f"{backend} {num_ranks} {nodes} {part}"
        if name not in launched:
            print(f"repeat with DISTMK_TEST_SEED={seed}")
            runner.timeout_s = 280.0  # two emulated ranks take 100 s of a slow core
            done = run_job(runner, command(JOB, backend, seed, part, num_ranks=num_ranks), **nodes)
            launched[name] = Run(num_ranks, seed, done.objects())
    found = [launched[f"{backend} {num_ranks} {nodes} {part}"] for part in parts]
    seeds = " ".join(dict.fromkeys(each.seed for each in found))
    yield Run(num_ranks, seeds, [result for each in found for result in each.results])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "num_ranks", "nodes"), [each for each in RUNS if each.values[1] == 1])
def test_body(run: Run, kind: str, backend: str) -> None:
    if kind == "scaled_linear" and backend != "host":
        pytest.skip("it has no body there")
    run.check(kind)


@pytest.mark.parametrize("kind", KINDS_BETWEEN_RANKS)
@pytest.mark.parametrize(("backend", "num_ranks", "nodes"), [each for each in RUNS if each.values[1] > 1])
def test_body_between_ranks(run: Run, kind: str, backend: str, nodes: dict[str, str]) -> None:
    if nodes == FAR and kind.split()[0] in OF_JOBS:
        pytest.skip("ranks that no pointer reaches run no job iterations")
    run.check(kind)


@pytest.mark.parametrize(("backend", "num_ranks", "nodes"), RUNS)
def test_all_bodies(run: Run) -> None:
    """Every rank's do what they should, write nothing but their outputs, of which `check` is told, fire their triggers, and do
    the same twice.
    """
    for kind in ("other memory", "accesses", "events", "same bits again"):
        assert {each["of"] for each in run.results if each["kind"] == kind} == set(range(run.num_ranks)), kind
    for kind in {each["kind"] for each in run.results}:
        run.check(kind)


@pytest.mark.whole
def test_the_board_for_gpus_is_a_correct_program() -> None:
    """What only a GPU can run is at least compiled and proved here."""
    rng = np.random.default_rng(1)
    for num_ranks in (1, 2):
        board = Board(rng, num_ranks, num_workers=16, gpu_layout=True)
        add_all(board, CUDA)
        check(board.compile())
        board = Board(rng, num_ranks, num_workers=16, gpu_layout=True)
        add_jobs(board, CUDA)
        check(board.compile())
        board = Board(rng, num_ranks, num_workers=16, gpu_layout=True)
        add_packed(board, CUDA)
        check(board.compile())


def test_row_tables_of_tests_fit(rng: np.random.Generator) -> None:
    for _ in range(100):
        runs = random_runs(rng, 50)
        batch = make_batch(runs, rng)
        assert 1 <= batch.num_rows <= MAX_ROWS and len({slot for _, slot, _ in runs}) == len(runs)
        assert ctypes.sizeof(batch) == ctypes.sizeof(Batch)
    assert make_batch([], rng).num_rows == 0


def test_candidate_layout() -> None:
    assert ctypes.sizeof(Candidate) == CANDIDATE.itemsize
