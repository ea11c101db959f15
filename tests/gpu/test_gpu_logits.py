"""Logits and greedy tokens against transformers, at real widths and any number of GPUs.

    python -m pytest -q tests/gpu/test_gpu_logits.py -k host             # the same test on the host twin, small models
    DISTMK_TEST_GGUF=... python -m pytest -q -rs tests/gpu/test_gpu_logits.py -k cuda          # 4 GPUs: all
    python -m pytest -q tests/gpu/test_gpu_logits.py -k "cuda and 0.6b" -m gpu                 # 1 GPU

Random weights are written to the temporary folder (4 GB for the largest) and removed after each model. Jobs of different
numbers of ranks run side by side where there are GPUs for them; transformers runs once a model, behind them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import shapes
from support.helpers import Runner
from support.machine import command, environment, num_gpus, num_places, on, require, run_job
from support.tiny import check_clear_share

HERE = Path(__file__).parent

NOISE = 1.3  # limit of the error, times that of transformers' own bf16 run; 1 for the mean error of many prompts
MODELS = {
    "cuda": {
        "smollm2": (1, 2, 3, 4),
        "qwen3-0.6b": (1, 2, 4),
        "qwen3-8b": (1, 2, 4),
        "llama-3.1-8b": (1, 2, 4),
        "qwen3-8b-many": (1, 2, 4),
    },
    "host": {"small-llama": (3,), "small-llama-many": (2,)},
    "emulated": {"small-gpu-qwen3": (2,), "small-gpu-qwen3-many": (1, 2)},
}
RUNS = [
    on(backend, name, num_ranks, num_ranks=num_ranks, slow=backend != "cuda")
    for backend, models in MODELS.items()
    for name, sizes in models.items()
    for num_ranks in sizes
]
pytestmark = pytest.mark.timeout(900)


@dataclass
class Model:
    """A model's folder, and the comparisons of its runs with transformers, by number of ranks."""

    backend: str
    name: str
    path: Path
    runner: Runner
    wanted: list[int]
    results: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" else "cpu"

    @property
    def settings(self) -> dict[str, str]:
        """The emulator has job iterations only if it is told so."""
        return {"DISTMK_ROW_BUCKETS": "16,40"} if self.backend == "emulated" and self.name.endswith("-many") else {}

    def run(self) -> None:
        waiting = [num_ranks for num_ranks in self.wanted if self.backend != "cuda" or num_ranks <= num_places()]
        folders = {num_ranks: self.runner.folder / str(num_ranks) for num_ranks in waiting}
        while waiting:
            self._side_by_side(waiting, folders)
        names = [str(folder) for folder in folders.values()]
        done = run_job(self.runner, command(HERE / "reference_job.py", self.device, self.name, str(self.path), *names))
        for record in done.objects():
            self.results.setdefault(int(record["folder"]), []).append(record)

    def _side_by_side(self, waiting: list[int], folders: dict[int, Path]) -> None:
        """Run as many jobs at once as there are GPUs for, each on GPUs of its own."""
        first, room = 0, max(waiting) if self.backend != "cuda" else num_places()
        running: dict[int, subprocess.Popen[str]] = {}
        for num_ranks in sorted(waiting, reverse=True):
            if first + num_ranks > room:
                continue
            places = range(first, first + num_ranks)
            visible = ",".join(map(str, sorted({place % max(1, num_gpus()) for place in places})))
            first += num_ranks
            waiting.remove(num_ranks)
            folders[num_ranks].mkdir()
            arguments = (self.backend, self.name, str(self.path), str(folders[num_ranks]))
            launcher = "torchrun" if num_ranks == 2 else "mpirun"
            start = command(HERE / "logits_job.py", *arguments, num_ranks=num_ranks, launcher=launcher)
            running[num_ranks] = self.runner.start(start, environment(CUDA_VISIBLE_DEVICES=visible, **self.settings))
        for num_ranks, process in running.items():
            done = self.runner.finish(process)
            assert done.status == 0, f"{self.name}, {num_ranks} ranks: status {done.status}\n{done.stderr[-4000:]}"
            (folders[num_ranks] / "cases").write_text(done.stdout)


@dataclass
class Models:
    """Makes and runs one model at a time, once; its folder is removed when the next one is made."""

    request: pytest.FixtureRequest
    tmp_path_factory: pytest.TempPathFactory
    present: Model | None = None

    def get(self, backend: str, name: str) -> Model:
        if self.present is None or (self.present.backend, self.present.name) != (backend, name):
            self.close()
            self._make(backend, name)
        assert self.present
        return self.present

    def close(self) -> None:
        if self.present is not None:
            shutil.rmtree(self.present.runner.folder)
            self.present.runner.check_nothing_left()
        self.present = None

    def _make(self, backend: str, name: str) -> None:
        folder = self.tmp_path_factory.mktemp(name)
        runner = Runner(folder, timeout_s=600)
        path: Path = self.request.getfixturevalue("smollm2") if name == "smollm2" else folder / "model"
        made = self.present = Model(backend, name, path, runner, self._selected(backend, name))
        if name != "smollm2":
            run_job(runner, [sys.executable, str(HERE / "shapes.py"), name, str(path), made.device])
        made.run()

    def _selected(self, backend: str, name: str) -> list[int]:
        """The numbers of ranks of a model in this session's tests."""
        params = [item.callspec.params for item in self.request.session.items if item.path == self.request.path]
        return sorted({each["num_ranks"] for each in params if (each["backend"], each["name"]) == (backend, name)})


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(request, tmp_path_factory)
    yield made
    made.close()


def root_mean_square(values: list[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


@pytest.mark.parametrize(("backend", "name", "num_ranks"), RUNS)
def test_logits_and_tokens(models: Models, backend: str, name: str, num_ranks: int) -> None:
    require(backend, num_ranks)
    model = models.get(backend, name)
    records = model.results.get(num_ranks, [])
    work = shapes.workload(name)
    assert len(records) == len(work.cases), "a run of this model failed before"
    errors: dict[str, list[float]] = {"ours": [], "bf16": [], "rounded": []}
    steps = clear = 0
    for record in records:
        what = f"{model.name} at {num_ranks} ranks, prompts {record['prompts']}"
        print(what, *(f"{name} {' '.join(f'{error:.2g}' for error in record[name])}" for name in errors), sep="; ")
        assert record["wrong"] is None, f"{what}: {record['wrong']}"
        assert record["launches"] == work.launches, (
            f"{what}: {record['launches']} of {work.launches} launches gave the first's tokens and bits"
        )
        for name, found in errors.items():
            found += record[name]
        steps, clear = steps + record["steps"], clear + record["clear"]
    check_clear_share(clear, steps)
    # Over all prompts, since one prompt's error is mostly a shift of all its logits, which varies much.
    for over, measure in (("root mean square", root_mean_square), ("largest", max)):
        ours, bf16 = measure(errors["ours"]), measure(errors["bf16"])
        print(f"{over} of {len(errors['ours'])} relative errors: {ours:.3g}, transformers in bf16: {bf16:.3g}")
        many = name.endswith("-many") and measure is root_mean_square
        assert ours <= (1.0 if many else NOISE) * bf16, (
            f"{over} error of the logits: {ours:.3g}; of transformers in bf16: {bf16:.3g}"
        )
