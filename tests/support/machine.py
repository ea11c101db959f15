"""Which backends this machine can run, and how the jobs of tests are started on them."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.helpers import ROOT, Finished, Runner, alone, under_mpirun, under_torchrun

from distmk.backends.defaults import why_no_cuda
from distmk.env import ranks_per_gpu

LAUNCHERS = {"mpirun": under_mpirun, "torchrun": under_torchrun}


FAR = {"DISTMK_VIRTUAL_NODE_SIZE": "1"}  # every rank on a node of its own, which no pointer reaches
SHARING = ("DISTMK_RANKS_PER_GPU", "DISTMK_VIRTUAL_NODE_SIZE")  # passed on to jobs


def virtual_hosts(env: dict[str, str], num_ranks: int) -> tuple[int, ...]:
    """The host sizes of ranks on the virtual nodes that `env` makes."""
    size = int(env.get("DISTMK_VIRTUAL_NODE_SIZE", num_ranks))
    return tuple(min(size, num_ranks - first) for first in range(0, num_ranks, size))


@functools.cache
def num_gpus() -> int:
    if why_no_cuda():
        return 0
    import torch

    return int(torch.cuda.device_count())


def num_places() -> int:
    """Ranks that fit on the GPUs: one each, or DISTMK_RANKS_PER_GPU."""
    return num_gpus() * ranks_per_gpu()


def require(backend: str, num_ranks: int = 1) -> None:
    """Skip the test where `num_ranks` ranks of `backend` cannot run, and say why."""
    if backend == "emulated" and platform.machine() != "x86_64":
        pytest.skip("the emulator's fibers are written for x86-64")
    if backend == "cuda" and num_places() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, has {num_places()}" + (f": {why}" if (why := why_no_cuda()) else ""))


def on(
    backend: str, *values: Any, num_ranks: int = 1, id: str | None = None, slow: bool = False, fast: bool = False
) -> Any:
    """Test parameters (backend, *values), marked by the GPUs that they need."""
    marks = [] if backend != "cuda" else [pytest.mark.gpu if num_ranks == 1 else pytest.mark.multigpu]
    marks += [pytest.mark.slow] * slow + [pytest.mark.fast] * fast
    return pytest.param(backend, *values, marks=marks, id=id)


def on_nodes(backend: str, num_ranks: int, nodes: dict[str, str] | None = None, fast: bool = False) -> Any:
    """Test parameters (backend, num_ranks, environment), `nodes` being the variables that make ranks those of other nodes."""
    return on(
        backend,
        num_ranks,
        nodes or {},
        num_ranks=num_ranks,
        id=f"{backend}-{num_ranks}{'-far' if nodes else ''}",
        fast=fast,
    )


def environment(**more: str) -> dict[str, str]:
    """Environment of a job: settings for MPI and Python of this machine, and the folders of the tests' modules."""
    env = {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_") or name in SHARING}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more


def sharing(num_ranks: int, **more: str) -> dict[str, str]:
    """Environment of a job whose ranks share a GPU."""
    return environment(CUDA_VISIBLE_DEVICES="0", DISTMK_RANKS_PER_GPU=str(num_ranks), **more)


def command(script: Path, *arguments: str, num_ranks: int = 1, launcher: str = "mpirun") -> list[str]:
    """The command line of a job."""
    start = alone if num_ranks == 1 else LAUNCHERS[launcher](num_ranks)
    return start([sys.executable, str(script), *arguments])


def run_job(runner: Runner, arguments: Sequence[str], **more: str) -> Finished:
    """Run a command, and fail unless its exit status is 0."""
    done = runner.run(arguments, environment(**more))
    assert done.status == 0, f"status {done.status}\n{done.stderr[-6000:]}"
    return done
