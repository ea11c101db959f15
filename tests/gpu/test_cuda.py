"""The megakernel against the host twin: the same program must pick the same tokens, at any number of GPUs."""

from __future__ import annotations

import os
import sys

import pytest
from helpers import ROOT, Runner

from distmk.choices import why_no_cuda

MODEL = ("--model", "smollm2-135m", "--load-format", "dummy")
PROMPTS = (
    "--prompt-ids",
    "1,2,3,4",
    ",".join(map(str, range(5, 23))),
    "--max-new-tokens",
    "24",
    "--ignore-eos",
    "--json",
)


def num_gpus() -> int:
    if why_no_cuda():
        return 0
    import torch

    return torch.cuda.device_count()


def tokens(runner: Runner, backend: str, num_ranks: int = 1) -> list[list[int]]:
    launcher = ["mpirun", "--allow-run-as-root", "-n", str(num_ranks)] if num_ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "distmk", "generate", *MODEL, *PROMPTS, "--backend", backend]
    # What the machine's administrator set for MPI and Python holds here too.
    env = {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = runner.finish(runner.start(command, env))
    assert done.status == 0, done.stderr
    return [record["token_ids"] for record in done.objects()]


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason=f"the cuda backend cannot run here: {why_no_cuda()}")
def test_same_tokens_as_the_host_twin(runner: Runner) -> None:
    assert tokens(runner, "cuda") == tokens(runner, "host")


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_same_tokens_at_any_number_of_gpus(runner: Runner, num_ranks: int) -> None:
    if num_gpus() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, {num_gpus()} here")
    assert tokens(runner, "cuda", num_ranks) == tokens(runner, "host")
