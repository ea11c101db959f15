"""How a launch is read from the environment, and which environments are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distmk.bootstrap import connect, detect
from distmk.bootstrap.agreement import _describe, _rebuild
from distmk.bootstrap.base import read_timeout_s
from distmk.bootstrap.detect import read_launch
from distmk.bootstrap.slurm import expand_nodelist, master_addr, master_port
from distmk.errors import DistmkError, HangError, Interrupted, UsageError, WaitRecord

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_VARIABLES = ("DISTMK_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_")

FOLLOWER = {"DISTMK_RANK": "1", "DISTMK_WORLD_SIZE": "2", "DISTMK_RENDEZVOUS": "x", "DISTMK_AUTHKEY": "00"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
SRUN_OF_ONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("num_ranks", "env", "kind"),
    [
        (None, {}, "single"),
        (1, {}, "single"),
        (2, {}, "local"),
        (None, FOLLOWER, "local"),
        (2, FOLLOWER | TORCH, "local"),
        (None, TORCH, "torch"),
        (2, TORCH | {"TORCHELASTIC_RUN_ID": "x"}, "torch"),
        (None, TORCH | OMPI | SRUN, "torch"),
        (None, OMPI, "mpi"),
        (None, OMPI | SRUN, "mpi"),
        (2, HYDRA, "mpi"),
        (None, {"PMIX_RANK": "0"}, "mpi"),
        # srun offers PMI itself; the proxies of an mpiexec that srun started have other ranks than their MPI processes.
        (None, SRUN | HYDRA, "slurm"),
        (None, SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpi"),
        (None, SRUN | {"PMIX_RANK": "1"}, "slurm"),
        (None, SRUN, "slurm"),
        (None, SRUN_OF_ONE, "single"),
        (3, SRUN_OF_ONE, "local"),
        (None, SBATCH, "single"),
        (4, SBATCH, "local"),
        # a launcher of one process, as in a container
        (None, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "single"),
        (2, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "local"),
        (2, {"WORLD_SIZE": "1"}, "local"),
        (2, {"RANK": "0", "WORLD_SIZE": "1"}, "local"),
        (2, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, "local"),
        (2, {"PMI_RANK": "0", "PMI_SIZE": "1"}, "local"),
        (None, OMPI | {"RANK": "0", "WORLD_SIZE": "1"}, "mpi"),
        # a job of one rank in each process
        *((1, env, "single") for env in (TORCH, OMPI, HYDRA, SRUN, {"PMIX_RANK": "3"})),
        (1, {"RANK": "1", "WORLD_SIZE": "4"}, "single"),
        (1, {"RANK": "4", "WORLD_SIZE": "4"}, "single"),
        # variables left over from other programs
        (None, OMPI | {"RANK": "0"}, "mpi"),
        (None, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "single"),
    ],
)
def test_detect(num_ranks: int | None, env: dict[str, str], kind: str) -> None:
    assert detect(num_ranks, env) == kind


@pytest.mark.parametrize(
    ("env", "local"),
    [
        (OMPI, (None, None)),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, (1, 3)),
        (HYDRA | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, (0, 1)),
        (SRUN, (0, None)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2"}, (0, None)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, (0, 2)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_local_rank_and_size(env: dict[str, str], local: tuple[int | None, int | None]) -> None:
    """As the launcher gives them; if all ranks are known to be on one host, rank 0 listens on loopback only."""
    launch = read_launch(None, env)
    assert (launch.local_rank, launch.local_size) == local


@pytest.mark.parametrize(
    ("env", "local"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (0, 1)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, (1, 2)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5"}, (0, 1)),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, (1, 3)),
        ({}, (0, 1)),
    ],
)
def test_place_of_a_rank_that_is_alone(env: dict[str, str], local: tuple[int, int]) -> None:
    """Its share of the host: its GPU, and its part of the cores."""
    with connect(1, env=env) as bootstrap:
        assert (bootstrap.kind, bootstrap.rank, bootstrap.world_size) == ("single", 0, 1)
        assert (bootstrap.local_rank, bootstrap.local_size) == local


def test_detect_reads_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith((*LAUNCH_VARIABLES, "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    assert detect() == "single"
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    assert detect() == "torch"


@pytest.mark.parametrize(
    ("num_ranks", "env", "text"),
    [
        (0, {}, "the number of ranks is 0; expected 1 to 64"),
        (4, TORCH | {"TORCHELASTIC_RUN_ID": "x"}, "--ranks 4 was given, but torchrun started 2 ranks"),
        (4, OMPI, "--ranks 4 was given, but the MPI launcher started 2 ranks"),
        (4, SRUN, "--ranks 4 was given, but srun started 2 ranks"),
        (None, {"RANK": "0"}, "RANK set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (None, {"WORLD_SIZE": "2"}, "WORLD_SIZE set without RANK"),
        (None, {k: v for k, v in TORCH.items() if k != "MASTER_PORT"}, "set without MASTER_PORT"),
        (None, TORCH | {"RANK": "two"}, "RANK must be a whole number, got 'two'"),
        (None, TORCH | {"RANK": "2"}, "RANK must be below WORLD_SIZE and not negative, got 2 of 2"),
        (None, TORCH | {"MASTER_PORT": "70000"}, "MASTER_PORT must be a port number, got '70000'"),
        (None, TORCH | {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be below LOCAL_WORLD_SIZE"),
        (None, {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
        (None, {"PMI_SIZE": "2"}, "PMI_SIZE is set but PMI_RANK is not"),
        (None, OMPI | {"OMPI_COMM_WORLD_SIZE": "0"}, "got 0 of 0"),
        (None, {"DISTMK_RANK": "1"}, "DISTMK_RANK is set but DISTMK_WORLD_SIZE, DISTMK_RENDEZVOUS, DISTMK_AUTHKEY"),
        (None, FOLLOWER | {"DISTMK_RANK": "0"}, "DISTMK_RANK must be at least 1"),
    ],
)
def test_detect_refuses(num_ranks: int | None, env: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect(num_ranks, env)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_follower_without_rank_0() -> None:
    """In a separate process, because joining makes a process a follower for good."""
    code = "from distmk.bootstrap import connect; connect()"
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_VARIABLES)} | FOLLOWER
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert "RankLostError: rank 0 is gone: rank 1 cannot join it" in done.stderr


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_timeout_must_be_a_positive_number(text: str) -> None:
    with pytest.raises(UsageError, match="must be a positive number of seconds"):
        read_timeout_s({"DISTMK_BOOTSTRAP_TIMEOUT_S": text})


def test_timeout_is_read() -> None:
    assert read_timeout_s({}) == 300
    assert read_timeout_s({"DISTMK_BOOTSTRAP_TIMEOUT_S": "2.5"}) == 2.5


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("a,b", ["a", "b"]),
        ("gpu[03-06,9]", ["gpu03", "gpu04", "gpu05", "gpu06", "gpu9"]),
        ("gpu[08-10],login-1", ["gpu08", "gpu09", "gpu10", "login-1"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_nodelist(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist", ["", ",", "a,,b", "gpu[1-", "gpu]1", "gpu[]", "gpu[3-1]", "gpu[a-b]", "gpu[1-999999999]"]
)
def test_nodelist_refused(nodelist: str) -> None:
    with pytest.raises(UsageError, match="Slurm node list"):
        expand_nodelist(nodelist)


def test_slurm_master() -> None:
    assert master_addr({"SLURM_JOB_NODELIST": "gpu[03-06]"}) == "gpu03"
    assert master_addr({"SLURM_JOB_NODELIST": "gpu[03-06]", "MASTER_ADDR": "x"}) == "x"
    ports = {master_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}) for job in range(1000, 1100)}
    assert len(ports) == 100 and all(1024 < port < 32768 for port in ports)
    assert master_port({"MASTER_PORT": "4000"}) == 4000
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        master_addr({})
    with pytest.raises(UsageError, match="MASTER_PORT must be a port number"):
        master_port({"MASTER_PORT": "x"})


def test_errors_keep_their_exit_code() -> None:
    """Also an error type with its own constructor."""
    for failure, code in ((HangError(WaitRecord(1, 2, "t", "e", 3, 0), 1.0), 5), (KeyboardInterrupt(), 130)):
        report = _describe(failure)
        assert report is not None
        error = _rebuild(3, report)
        assert isinstance(error, DistmkError) and error.exit_code == code and str(error).startswith("rank 3: ")
    assert isinstance(error, Interrupted)
