"""The scripts of launch/: their usage lines, the flags they choose, and the ranks they start."""

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


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


@pytest.mark.parametrize("count", [["3"], ["-n", "3"], ["-np", "3"]])
@pytest.mark.parametrize(
    ("mpi", "user", "cores", "needed"),
    [
        ("mpirun (Open MPI) 5.0.11", 0, 2, {"--bind-to", "--allow-run-as-root", "--oversubscribe"}),
        ("mpirun (Open MPI) 5.0.11", 1000, 2, {"--bind-to", "--oversubscribe"}),
        ("mpirun (Open MPI) 5.0.11", 0, 3, {"--bind-to", "--allow-run-as-root"}),
        ("HYDRA build details: Version: 4.3", 0, 2, set()),
    ],
)
def test_mpirun_flags(tmp_path: Path, mpi: str, user: int, cores: int, needed: set[str], count: list[str]) -> None:
    """What this MPI, user and machine need, and no more; each core here has two hardware threads."""
    programs = tmp_path / "bin"
    make_program(programs / "mpirun", f'[[ $1 == --version ]] && echo "{mpi}" && exit\nprintf "%s\\n" "$@"')
    make_program(programs / "id", f"echo {user}")
    make_program(programs / "nproc", f"echo {2 * cores}")
    make_program(
        programs / "lscpu", f'echo "# Socket,Core"; for i in {{1..{cores}}}; do echo "0,$i"; echo "0,$i"; done'
    )
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "MPIRUN": str(programs / "mpirun")}
    command = ["bash", str(ROOT / "launch" / "mpirun.sh"), *count, "generate", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=10)
    told = done.stdout.splitlines()
    assert told[:2] == ["-n", "3"] and told[-4:] == ["-m", "distmk", "generate", "--json"], (done.stdout, done.stderr)
    assert {flag for flag in told[2:-4] if flag.startswith("--")} == needed


def test_torchrun_script_without_torch(tmp_path: Path) -> None:
    """It says what to install."""
    make_program(tmp_path / "bin" / "python", f'exec {sys.executable} -I -S "$@"')
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), "2", "generate"]
    env = os.environ | {"VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert f"{tmp_path}/bin/python has no torch: {tmp_path}/bin/python -m pip install torch, or use" in done.stderr


FAKE_SRUN = """while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait $! && exit $code
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("script", "kind"), [("mpirun.sh", "mpi"), ("torchrun.sh", "torch"), ("slurm.sbatch", "slurm")]
)
def test_launch_script_starts_ranks(job: Job, tmp_path: Path, script: str, kind: str) -> None:
    """In a copy of the repository in which `python -m distmk` runs the script of these tests."""
    pytest.importorskip("torch")
    if kind == "mpi":
        mpirun_command()
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("abi", "bootstrap"):
        shutil.copytree(ROOT / "distmk" / name, tmp_path / "distmk" / name)
    for module in (ROOT / "distmk").glob("*.py"):
        shutil.copy(module, tmp_path / "distmk")
    (tmp_path / "distmk" / "__init__.py").write_text("")
    shutil.copy(SCRIPT, tmp_path / "distmk" / "__main__.py")
    srun = tmp_path / "bin" / "srun"
    make_program(srun, FAKE_SRUN)
    variables = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{srun.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    if kind == "torch":
        variables["TMPDIR"] = str(tmp_path)  # torchrun leaves its folder of logs behind
    if kind == "slurm":
        variables |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_SUBMIT_DIR": str(tmp_path)}
    count = {"mpi": ["-n", "2"], "torch": ["2"], "slurm": []}[kind]
    done = job.run("exchange", 2, ["bash", str(tmp_path / "launch" / script), *count], **variables)
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), kind, 2)
