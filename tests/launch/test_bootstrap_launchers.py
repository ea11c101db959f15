"""Ranks that a launcher starts, and what is left of one in the environment."""

from __future__ import annotations

import pytest
from bootstrap_runs import JOB, Job, check_exchange, mpirun, torchrun

pytestmark = pytest.mark.timeout(120)


def test_mpirun_exchange(job: Job) -> None:
    done = job.run("exchange", 0, mpirun())
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "mpi", 3)


def test_mpirun_agree(job: Job) -> None:
    done = job.run("one_fails", 0, mpirun())
    assert done.status == 0, done.stderr
    assert job.notes()["0"]["text"] == "rank 1: no config.json on 1"


def test_mpirun_silent_rank_is_named(job: Job) -> None:
    done = job.run("silent", 0, mpirun(), DISTMK_BOOTSTRAP_TIMEOUT_S="2")
    assert done.status != 0  # The others leave without MPI_Finalize, which makes mpirun end rank 1.
    notes = job.notes()
    assert {notes[rank]["text"] for rank in ("0", "2") if rank in notes} == {"rank 1 did not answer within 2 s"}


def test_mpirun_ends_all_when_a_rank_is_killed(job: Job) -> None:
    assert job.run("follower_killed", 0, mpirun()).status != 0


def test_mpirun_abort(job: Job) -> None:
    assert job.run("aborted", 0, mpirun()).status == 9


def test_mpirun_and_other_number_of_ranks(job: Job) -> None:
    done = job.run("exchange", 2, mpirun())
    assert done.status != 0
    assert job.notes()["error0"]["text"] == (
        "--ranks 2 was given, but the MPI launcher started 3 ranks; "
        "leave --ranks out under a launcher, or give the same number"
    )


def test_torchrun_exchange(job: Job) -> None:
    done = job.run("exchange", 0, torchrun())
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "torch", 2)


def test_torch_variables_alone(job: Job) -> None:
    """Without torchrun rank 0 has to be the store, and local ranks are found out from the host names."""
    pytest.importorskip("torch")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shell = (
        f"export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}; "
        'RANK=1 "$@" & RANK=0 "$@"; code=$?; wait $! && exit $code'
    )
    done = job.run("exchange", 0, ["bash", "-c", shell, "bash", *JOB])
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "torch", 2)


def test_srun_variables_alone(job: Job) -> None:
    pytest.importorskip("torch")
    shell = (
        "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=$$ SLURM_STEP_ID=0; "
        'SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait $! && exit $code'
    )
    done = job.run("exchange", 0, ["bash", "-c", shell, "bash", *JOB])
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "slurm", 2)
