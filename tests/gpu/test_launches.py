"""A generate call, prompts included, is exactly one kernel launch on every GPU, as CUPTI records it; with
DISTMK_LAUNCH_ITERATIONS=1, a launch an iteration.

python -m pytest -q -rs -s tests/gpu/test_launches.py            # 1, 2 and 4 GPUs, about a minute each
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launches_job import CALLS
from support.helpers import Runner
from support.machine import command, on, require, run_job

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [on("host", 1, slow=True), on("host", 2), *(on("cuda", n, num_ranks=n) for n in (1, 2, 4))],
)
def test_one_launch_a_call(runner: Runner, backend: str, num_ranks: int) -> None:
    require(backend, num_ranks)
    records = run_job(runner, command(HERE / "launches_job.py", backend, num_ranks=num_ranks)).objects()
    assert len(records) == CALLS * num_ranks
    for record in records:
        assert record["started"] == 1, record
        if backend == "cuda" and record["kernels"]:
            assert record["kernels"] == ["distmk_megakernel"], record
        elif backend == "cuda":
            print("CUPTI recorded no kernel here; the launches that the backend asked for were counted instead")
        if record["rank"] == 0:
            assert [len(tokens) for tokens in record["tokens"]] == [12] * 3, record
            assert record["tokens"] == records[0]["tokens"], "calls gave different tokens"


@pytest.mark.parametrize(
    ("backend", "num_ranks"), [on("host", 2, slow=True), *(on("cuda", n, num_ranks=n) for n in (1, 2, 4))]
)
def test_a_launch_an_iteration(runner: Runner, backend: str, num_ranks: int) -> None:
    """Without cooperative launches: the same tokens."""
    require(backend, num_ranks)
    job = command(HERE / "launches_job.py", backend, num_ranks=num_ranks)
    whole = run_job(runner, job).objects()
    cut = run_job(runner, job, DISTMK_LAUNCH_ITERATIONS="1").objects()
    assert [record["tokens"] for record in cut] == [record["tokens"] for record in whole]
    for record in cut if backend == "cuda" else ():
        assert record["started"] > 12, record  # tokens a prompt
        assert record["kernels"] in ([], ["distmk_megakernel"] * record["started"]), record
