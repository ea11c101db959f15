"""Random requests for a while, up to 128 at once, and every greedy token beside transformers.

    python -m pytest -q -s tests/gpu/test_soak.py -k "cuda-1"     # 1 GPU, about 4 minutes
    python -m pytest -q -s tests/gpu/test_soak.py -k host         # 3 s of it on the host twin

The requests come in a burst, then as many as can run, for a while few or none. Prompts have up to 6,000 tokens and share
prefixes, some completions are drawn, and some are cancelled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.helpers import Runner
from support.machine import command, environment, on, require, run_job

HERE = Path(__file__).parent

WORST = 0.25  # standard deviations of a position's logits
LENGTHS = {"cuda": (120, 300), "host": (3, 40)}  # seconds, completions that are checked
SHAPES = {"cuda": "qwen3-0.6b", "host": "small-llama"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        on("host", 1),
        on("host", 2, slow=True),
        *(on("cuda", num_ranks, num_ranks=num_ranks, slow=True, id=f"cuda-{num_ranks}") for num_ranks in (1, 2)),
    ],
)
def test_soak(runner: Runner, backend: str, num_ranks: int) -> None:
    require(backend, num_ranks)
    runner.timeout_s = 600
    seed = os.environ.get("DISTMK_TEST_SEED") or str(int.from_bytes(os.urandom(3), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    device, (seconds, count) = "cuda" if backend == "cuda" else "cpu", LENGTHS[backend]
    model, output = runner.folder / "model", runner.folder / "completions"
    run_job(runner, [sys.executable, str(HERE / "shapes.py"), SHAPES[backend], str(model), device])
    arguments = (backend, str(model), str(seconds), seed, str(output))
    done = runner.run(command(HERE / "soak_job.py", *arguments, num_ranks=num_ranks), environment())
    assert done.status == 0, f"status {done.status}\n{done.stderr[-4000:]}"
    (served,) = done.objects()
    (checked,) = run_job(
        runner, [sys.executable, str(HERE / "soak_reference_job.py"), device, str(model), str(output), str(count)]
    ).objects()
    print(json.dumps(served), json.dumps(checked))
    assert served["whole"] > 10 and served["cancelled"] > 0 and served["most_running"] >= 40
    assert checked["tokens"] > 100 and checked["worst"] < WORST, f"{checked['where']}: {checked['worst']:.3g}"
    runner.check_nothing_left()
