"""Logits and greedy tokens against transformers, at real widths and any number of GPUs.

    python -m pytest -q tests/gpu/test_gpu_logits.py -k host             # the same test on the host twin, small models
    DISTMK_TEST_GGUF=... python -m pytest -q -rs tests/gpu/test_gpu_logits.py -k cuda          # 4 GPUs: all
    python -m pytest -q tests/gpu/test_gpu_logits.py -k "cuda and 0.6b" -m gpu                 # 1 GPU

Random weights are written to the temporary folder (4 GB for the largest) and removed after each model. Jobs of different
numbers of ranks run side by side where there are GPUs for them; transformers runs once a model, behind them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import shapes
from helpers import Runner
from machine import HERE, command, environment, num_gpus, on, require, run_job

NOISE = 1.3  # times transformers' own bf16 run
MODELS = {
    "cuda": {"smollm2": (1, 2, 3, 4), "qwen3-0.6b": (1, 2, 4), "qwen3-8b": (1, 2, 4), "llama-3.1-8b": (1, 2, 4)},
    "host": {"small-qwen3": (1, 2), "small-llama": (3,)},
}
RUNS = [
    on(backend, name, num_ranks, num_ranks=num_ranks)
    for backend, models in MODELS.items()
    for name, sizes in models.items()
    for num_ranks in sizes
]
pytestmark = pytest.mark.timeout(900)


@dataclass
class Model:
    """One model's folder, and what transformers says of the runs on it, by number of ranks."""

    backend: str
    name: str
    path: Path
    runner: Runner
    wanted: list[int]
    results: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" else "cpu"

    def run(self) -> None:
        waiting = [num_ranks for num_ranks in self.wanted if self.backend == "host" or num_ranks <= num_gpus()]
        folders = {num_ranks: self.runner.folder / str(num_ranks) for num_ranks in waiting}
        while waiting:
            self._side_by_side(waiting, folders)
        names = [str(folder) for folder in folders.values()]
        done = run_job(self.runner, command("reference_job.py", self.device, self.name, str(self.path), *names))
        for record in done.objects():
            self.results.setdefault(int(record["folder"]), []).append(record)

    def _side_by_side(self, waiting: list[int], folders: dict[int, Path]) -> None:
        """Start jobs on GPUs of their own, as many as there are GPUs for, and wait for them."""
        first, room = 0, max(waiting) if self.backend == "host" else num_gpus()
        running: dict[int, subprocess.Popen[str]] = {}
        for num_ranks in sorted(waiting, reverse=True):
            if first + num_ranks > room:
                continue
            visible = ",".join(str(gpu) for gpu in range(first, first + num_ranks))
            first += num_ranks
            waiting.remove(num_ranks)
            folders[num_ranks].mkdir()
            arguments = (self.backend, self.name, str(self.path), str(folders[num_ranks]))
            launcher = "torchrun" if num_ranks == 2 else "mpirun"
            start = command("logits_job.py", *arguments, num_ranks=num_ranks, launcher=launcher)
            running[num_ranks] = self.runner.start(start, environment(CUDA_VISIBLE_DEVICES=visible))
        for num_ranks, process in running.items():
            done = self.runner.finish(process)
            assert done.status == 0, f"{self.name}, {num_ranks} ranks: status {done.status}\n{done.stderr[-4000:]}"
            (folders[num_ranks] / "cases").write_text(done.stdout)


def selected(request: pytest.FixtureRequest, backend: str, name: str) -> list[int]:
    """The numbers of ranks that this session's tests ask of a model."""
    found = []
    for item in request.session.items:
        params = getattr(item, "callspec", None)
        if item.path == request.path and params and params.params.get("model") == (backend, name):
            found.append(params.params["num_ranks"])
    return sorted(set(found))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    backend, name = request.param
    wanted = selected(request, backend, name)
    require(backend, min(wanted))
    folder = tmp_path_factory.mktemp(name)
    runner = Runner(folder, timeout_s=600)
    path = Path(os.environ.get("DISTMK_TEST_GGUF", "")) if name == "smollm2" else folder / "model"
    made = Model(backend, name, path, runner, wanted)
    if name != "smollm2":
        run_job(runner, [sys.executable, str(HERE / "shapes.py"), name, str(path), made.device])
    elif not path.is_file():
        pytest.skip("DISTMK_TEST_GGUF does not name the .gguf file of SmolLM2-135M")
    made.run()
    yield made
    shutil.rmtree(folder)
    runner.check_nothing_left()


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [
        pytest.param((p.values[0], p.values[1]), p.values[2], marks=p.marks, id="-".join(map(str, p.values)))
        for p in RUNS
    ],
    indirect=["model"],
)
def test_logits_and_tokens(model: Model, num_ranks: int) -> None:
    require(model.backend, num_ranks)
    records = model.results[num_ranks]
    assert len(records) == len(shapes.workload(model.name).cases)
    steps = clear = 0
    for record in records:
        what = f"{model.name} at {num_ranks} ranks, prompts {record['prompts']}"
        print(what, json.dumps({key: record[key] for key in ("ours", "bf16", "cached", "steps", "clear")}))
        assert record["wrong"] is None, f"{what}: {record['wrong']}"
        assert record["launches"] == 3, f"{what}: {record['launches']} of 3 launches gave the first's tokens and bits"
        assert record["ours"] <= NOISE * record["bf16"], (
            f"{what}: logits are off by {record['ours']:.3g}, transformers in bf16 by {record['bf16']:.3g}"
        )
        steps, clear = steps + record["steps"], clear + record["clear"]
    assert clear > 0.5 * steps, f"{clear} of {steps} steps leave no choice: too few to tell"
