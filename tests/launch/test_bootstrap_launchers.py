"""Ranks that a launcher starts, or that have only a launcher's variables."""

from __future__ import annotations

import shutil
import time

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


def test_mpirun_connects_twice(job: Job) -> None:
    """MPI is initialised and finalised once, however many groups a process joins."""
    done = job.run("twice", 0, mpirun())
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "mpi", 3)


def test_mpirun_on_one_core(job: Job) -> None:
    """No rank spins for another one that waits for the core."""
    if shutil.which("taskset") is None:
        pytest.skip("no taskset")
    started = time.monotonic()
    done = job.run("exchange", 0, ["taskset", "-c", "0", *mpirun()])
    assert done.status == 0, done.stderr
    assert time.monotonic() - started < 30
    check_exchange(job.notes(), "mpi", 3)


def test_mpirun_fork_does_not_end_the_job(job: Job) -> None:
    done = job.run("forked", 0, mpirun())
    assert done.status == 0, done.stderr
    assert [note["gathered"] for note in job.notes().values()] == [3, 3, 3]


def test_mpirun_silent_rank_is_named(job: Job) -> None:
    done = job.run("silent", 0, mpirun(), DISTMK_BOOTSTRAP_TIMEOUT_S="2")
    assert done.status != 0  # the others leave without MPI_Finalize, which makes mpirun end rank 1
    notes = job.notes()
    assert {notes[rank]["text"] for rank in ("0", "2") if rank in notes} == {"rank 1 did not answer rank 0 within 2 s"}


@pytest.mark.parametrize(("scenario", "lost"), [("follower_killed", 2), ("hub_killed", 0)])
def test_mpirun_killed_rank_is_named_on_every_rank(job: Job, scenario: str, lost: int) -> None:
    started = time.monotonic()
    done = job.run(scenario, 0, mpirun())
    assert time.monotonic() - started < 20
    assert done.status != 0
    assert f"rank {lost} with PID" in done.stderr, done.stderr  # mpirun's own line
    notes = job.notes()
    assert sorted(notes) == [str(rank) for rank in range(3) if rank != lost]
    for note in notes.values():
        assert (note["type"], note["text"]) == ("RankLostError", f"rank {lost} left or died")
        assert note["again"] == note["text"]


@pytest.mark.parametrize("scenario", ["killed_after_close", "exits_after_close"])
def test_mpirun_rank_that_never_finalises(job: Job, scenario: str) -> None:
    """The other ranks, in MPI_Finalize by then, are ended by mpirun."""
    started = time.monotonic()
    done = job.run(scenario, 0, mpirun())
    assert time.monotonic() - started < 20
    assert done.status != 0


def test_mpirun_rank_that_raises_is_named(job: Job) -> None:
    """At once: it says that it leaves, and nobody waits for the timeout of 300 s."""
    started = time.monotonic()
    done = job.run("raises", 0, mpirun())
    assert time.monotonic() - started < 20
    assert done.status != 0
    notes = job.notes()
    assert notes["1"]["type"] == "KeyError"
    assert {notes[rank]["text"] for rank in ("0", "2") if rank in notes} == {"rank 1 left the job"}


def test_mpirun_abort(job: Job) -> None:
    assert job.run("aborted", 0, mpirun()).status == 9


def test_mpirun_and_other_number_of_ranks(job: Job) -> None:
    done = job.run("exchange", 2, mpirun())
    assert done.status != 0
    assert job.notes()["error0"]["text"] == (
        "--ranks 2 was given, but the MPI launcher started 3 ranks; leave --ranks (tensor_parallel_size) out under a "
        "launcher, give the same number, or in a script tensor_parallel_size=1 for a model in each process"
    )


def test_torchrun_exchange(job: Job) -> None:
    done = job.run("exchange", 0, torchrun())
    assert done.status == 0, done.stderr
    check_exchange(job.notes(), "torch", 2)


def test_torch_variables_alone(job: Job) -> None:
    """Without torchrun rank 0 hosts the store, and local ranks follow from the host names."""
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


def test_srun_variables_of_two_hosts_without_a_key(job: Job) -> None:
    """Both ranks refuse at once, in one line that says how to make a key."""
    pytest.importorskip("torch")
    shell = (
        "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 MASTER_ADDR=127.0.0.7 SLURM_JOB_ID=$$ SLURM_STEP_ID=0; "
        'SLURM_PROCID=1 SLURM_LOCALID=0 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait $!; exit $code'
    )
    started = time.monotonic()
    done = job.run("exchange", 0, ["bash", "-c", shell, "bash", *JOB])
    assert done.status == 2 and time.monotonic() - started < 30
    text = job.notes()["error0"]["text"]
    assert "ranks on several hosts need a key" in text and "secrets.token_hex(32)" in text
