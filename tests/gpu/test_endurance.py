"""A thousand generate calls in a row, and one of 20,000 tokens: tokens stay the same, and memory does not grow.

python -m pytest -q -s tests/gpu/test_endurance.py -m multigpu   # 4 GPUs, about 2 minutes
python -m pytest -q tests/gpu/test_endurance.py -k host          # a fraction of it on the host twin
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.faults import write_config
from support.helpers import Runner
from support.machine import command, environment, on, require
from support.tiny_config import tiny_config

from distmk.model.presets import PRESETS

HERE = Path(__file__).parent

CONFIG = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=3, tie_embeddings=False)
GROWTH_MB = 20.0  # limit of a process' growth over the last nine tenths of the calls


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "num_ranks", "calls", "tokens"),
    [
        on("host", 2, 40, 800),
        pytest.param("cuda", 4, 1000, 20_000, marks=[pytest.mark.multigpu, pytest.mark.slow]),
    ],
)
def test_endurance(tmp_path: Path, backend: str, num_ranks: int, calls: int, tokens: int) -> None:
    require(backend, num_ranks)
    runner = Runner(tmp_path, timeout_s=1100)
    config = write_config(CONFIG if backend == "cuda" else tiny_config(), tmp_path / "config.json")
    arguments = (backend, str(config), str(calls), str(tokens))
    done = runner.run(command(HERE / "endurance_job.py", *arguments, num_ranks=num_ranks), environment())
    assert done.status == 0, f"status {done.status}\n{done.stderr[-4000:]}"
    (found,) = done.objects()
    print(json.dumps(found))
    assert found["calls"] == calls, f"{found['calls']} of {calls} calls gave the first's tokens: {found['differing']}"
    assert (found["tokens"], found["same"]) == (tokens, True)
    before, after = found["memory_mb"]
    assert after - before < GROWTH_MB, f"the process grew from {before:.0f} to {after:.0f} MB"
    runner.check_nothing_left()
