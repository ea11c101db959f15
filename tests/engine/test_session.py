"""`Session` chooses its backend, tells of mistakes in one line, and gives torch tensors in the memory of the tasks."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.graph_runs import assert_done, run_job
from support.helpers import ROOT, Runner
from support.machine import on, require

import distmk
from distmk import UsageError
from distmk.backends import defaults
from distmk.backends.defaults import agree_on_backend, agree_on_workers
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine.engine import Engine
from distmk.engine.engine_args import EngineArgs
from distmk.tasks import Affine

pytestmark = pytest.mark.timeout(120)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [("host", 2), ("emulated", 1), on("cuda", 1), on("cuda", 2, num_ranks=2)],
)
def test_tensors_are_the_memory_of_tasks(tmp_path: Path, backend: str, num_ranks: int) -> None:
    require(backend, num_ranks)
    seed = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    assert_done(run_job(tmp_path, "tensors", num_ranks, backend=backend, seed=seed))


def doubling() -> distmk.Graph:
    """y = 2 x."""
    graph = distmk.Graph(1)
    graph.add(Affine(0, "double", src=graph.buffer("x", 8).at(0), dst=graph.buffer("y", 8).at(0), scale=2.0))
    return graph


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "why_no_cuda", lambda: "the test says so")


@pytest.mark.parametrize("wanted", [None, "auto", "host"])
def test_without_a_gpu_it_is_the_host(no_gpu: None, wanted: str | None, rng: np.random.Generator) -> None:
    with SingleBootstrap(5.0) as bootstrap, distmk.Session(doubling(), bootstrap, backend=wanted) as session:
        assert session.backend_name == "host"
        values = torch.from_numpy(rng.standard_normal(8, np.float32))
        session.tensor("x")[0] = values
        session.run()
        torch.testing.assert_close(session.tensor("y")[0], 2 * values, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["host", "emulated", on("cuda")])
def test_written_values_are_what_tasks_read(backend: str, rng: np.random.Generator) -> None:
    """In the buffer's dtype, broadcast to its shape; torch rounds to bf16 alike."""
    require(backend)
    values, row = rng.standard_normal((3, 5), np.float32), rng.standard_normal(5)
    graph = doubling()
    buffers = {dtype: graph.buffer(dtype, 5, rows=3, dtype=dtype) for dtype in ("f32", "bf16", "i32")}
    with SingleBootstrap(60.0) as bootstrap, distmk.Session(graph, bootstrap, backend=backend) as session:
        session.write("x", range(8))
        session.run()
        assert session.view("y").tolist() == [[2.0 * i for i in range(8)]]
        for written in (values, row, 7):
            for dtype, buffer in buffers.items():
                session.write(buffer, written)
                wanted = torch.from_numpy(np.array(np.broadcast_to(written, (3, 5)))).to(session.tensor(buffer).dtype)
                assert torch.equal(session.tensor(buffer).cpu(), wanted), dtype
        bits = rng.integers(0, 1 << 15, (3, 5)).astype(np.uint16)
        session.write("bf16", bits)
        assert np.array_equal(session.view("bf16"), bits)
        for wrong in (range(4), np.zeros((2, 5)), "text", [[1], [2, 3]]):
            with pytest.raises(UsageError, match=r"^buffer f32 is f32 \[3, 5\], and the values are not: [^\n]*$"):
                session.write("f32", wrong)


@pytest.mark.parametrize("wanted", ["cuda", "gpu"])
def test_the_same_refusal_as_of_a_model(no_gpu: None, wanted: str) -> None:
    with SingleBootstrap(5.0) as bootstrap, pytest.raises(UsageError) as of_model:
        Engine(EngineArgs("nowhere", backend=wanted), bootstrap)
    for make in (lambda b: distmk.Session(doubling(), b, backend=wanted), lambda b: distmk.choose_target(b, wanted)):
        with SingleBootstrap(5.0) as bootstrap, pytest.raises(UsageError) as refused:
            make(bootstrap)
        assert str(refused.value) == str(of_model.value)
    assert "the test says so" in str(of_model.value) or "'gpu' is not one of auto, host" in str(of_model.value)


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    session = distmk.Session(doubling(), SingleBootstrap(5.0), backend="host")
    with pytest.raises(UsageError, match=r"^there is no buffer z in this program; give"):
        session.tensor("z")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match=r"^a tensor of a buffer needs torch .*view"):
        patch.setitem(sys.modules, "torch", None)
        session.tensor("x")
    for count in (-1, 0, 1 << 32, 2.0, True):
        for run in (session.run, session.run_traced):
            with pytest.raises(UsageError, match=rf"^num_iterations is {count}; expected 1 to 4294967295$"):
                run(count)
    with pytest.raises(UsageError, match=r"^num_kept is 0; expected 1 to"):
        session.run_traced(3, 0)
    for buffer in (None, doubling().buffers[0].at(0)):
        with pytest.raises(UsageError, match=r"is no buffer; give what graph.buffer returned, or its name$"):
            session.view(buffer)
    session.close()
    for use in (lambda: session.tensor("x"), lambda: session.view("x"), session.run, session.run_traced):
        with pytest.raises(UsageError, match=r"^this session is closed; "):
            use()
    for deadline_s in (0, -1, "a", math.nan, math.inf):
        with pytest.raises(UsageError, match=r"^deadline_s is .*; expected more than 0"):
            distmk.Session(doubling(), SingleBootstrap(5.0), backend="host", deadline_s=deadline_s)
    with pytest.raises(UsageError, match=r"^Session\(None, .*; expected a graph, and what distmk.connect"):
        distmk.Session(None, SingleBootstrap(5.0))
    for num_workers in (0, "a", 1.5, 5000):
        with pytest.raises(UsageError, match=r"^num_workers is .*; expected 1 to 4096, or None"):
            distmk.choose_target(SingleBootstrap(5.0), "host", num_workers)


JOB = """
import sys, distmk

def main():
    with distmk.connect(2, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
        graph = distmk.Graph(2)
        x = graph.buffer("x", 8)
        for rank in range(2):
            graph.add(distmk.tasks.Affine(rank, "in place", src=x.at(rank), dst=x.at(rank), scale=2.0))
        with distmk.Session(graph, bootstrap, backend="host") as session:
            exec(sys.argv[1] if bootstrap.rank else "session.run(3)")

distmk.run_main(main)
"""


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("session.view('z')", "rank 1: there is no buffer z in this program"),
        ("session.close(); session.run(3)", "rank 1: this session is closed"),
        (
            "session.run(4)",
            "different numbers of iterations: num_iterations: rank 1 differs from rank 0 ('4' on rank 1, '3'",
        ),
        ("session.run(0)", "rank 1: num_iterations is 0; expected 1 to"),
    ],
)
def test_a_mistake_of_one_rank(mistake: str, text: str, runner: Runner) -> None:
    """Ends all ranks at once, and the text is there, whichever rank it is."""
    (runner.folder / "job.py").write_text(JOB)
    runner.timeout_s = 20
    done = runner.run([sys.executable, str(runner.folder / "job.py"), mistake], {"PYTHONPATH": str(ROOT)})
    assert done.status != 0 and text in done.stderr and "Traceback" not in done.stderr, done


def ranks_that_choose(*choices: str) -> Any:
    """A bootstrap of rank 0, whose peers send these choices where it sends its own."""
    parts = [f'"{choice}"'.encode() if not choice.isdigit() else choice.encode() for choice in choices]
    return SimpleNamespace(
        rank=0,
        world_size=len(choices) + 1,
        local_rank=0,
        local_size=1,
        allgather=lambda mine: [mine, *(parts if mine != b"null" else [mine] * len(parts))],
    )


def test_ranks_must_choose_the_same(no_gpu: None) -> None:
    assert agree_on_backend(ranks_that_choose("host", "host"), None) == "host"
    with pytest.raises(
        UsageError, match=r"^the backend is host on rank 0, but cuda on ranks 1, 3; give every rank the"
    ):
        agree_on_backend(ranks_that_choose("cuda", "host", "cuda"), "auto")
    assert agree_on_workers(ranks_that_choose("7", "3"), 5, "emulated") == 3


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_target_makes_graphs(no_gpu: None, num_workers: int) -> None:
    """Its matrices are cut into a slab a worker; what is no bf16 matrix is refused."""
    with SingleBootstrap(5.0) as bootstrap:
        target = distmk.choose_target(bootstrap, "emulated", num_workers)
    assert target == distmk.Target("emulated", 1, num_workers)
    graph = target.graph()
    assert (graph.num_ranks, graph.num_workers) == (1, num_workers)
    slabs = target.matrix(graph, "w", 0, torch.zeros(400, 80, dtype=torch.bfloat16))
    rows = [row for slab in slabs for row in range(slab.row_begin, slab.row_end)]
    assert rows == list(range(400)) and len(slabs) == num_workers
    for wrong in (torch.zeros(4, 4), np.zeros((4, 4), np.float32), torch.zeros(4, dtype=torch.bfloat16), [1.0]):
        with pytest.raises(UsageError, match=r"^matrix w is .*; expected bf16 \[n, k\]"):
            target.matrix(graph, "w", 0, wrong)  # type: ignore[arg-type]
