"""The scripts of launch/: they tell how they are used, and start ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bootstrap_runs import SCRIPT, Job, check_exchange
from support.helpers import ROOT, mpirun_command

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("script", ["mpirun.sh", "torchrun.sh", "slurm.sbatch"])
def test_launch_script_is_sound(script: str) -> None:
    path = ROOT / "launch" / script
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    for setting in ("NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1"):
        assert setting in path.read_text()


FAKE_SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait $! && exit $code
"""


@pytest.mark.parametrize(
    ("script", "kind"), [("mpirun.sh", "mpi"), ("torchrun.sh", "torch"), ("slurm.sbatch", "slurm")]
)
def test_launch_script_starts_ranks(job: Job, tmp_path: Path, script: str, kind: str) -> None:
    """In a copy of the repository whose `python -m distmk` is the script of these tests."""
    pytest.importorskip("torch")
    if kind == "mpi":
        mpirun_command()
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copytree(ROOT / "distmk" / "bootstrap", tmp_path / "distmk" / "bootstrap")
    shutil.copy(ROOT / "distmk" / "errors.py", tmp_path / "distmk")
    (tmp_path / "distmk" / "__init__.py").touch()
    shutil.copy(SCRIPT, tmp_path / "distmk" / "__main__.py")
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    variables = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{srun.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    if kind == "torch":
        variables["TMPDIR"] = str(tmp_path)  # torchrun leaves its folder of logs behind.
    if kind == "slurm":
        variables |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_SUBMIT_DIR": str(tmp_path)}
    count = [] if kind == "slurm" else ["2"]
    done = job.run("exchange", 2, ["bash", str(tmp_path / "launch" / script), *count], **variables)
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), kind, 2)
