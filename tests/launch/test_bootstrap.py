"""How ranks find each other, agree, and notice that one is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distmk.bootstrap import agree, agree_same, connect
from distmk.bootstrap.base import pack, unpack
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_VARIABLES = ("DISTMK_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_")

JOB = Path(__file__).with_name("bootstrap_job.py")


class Job:
    """Runs bootstrap_job.py under a launcher and sees that nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self.token = uuid.uuid4().hex

    def run(
        self, scenario: str, num_ranks: int, prefix: list[str] | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_VARIABLES)}
        env |= {"JOB_TOKEN": self.token, "PYTHONPATH": str(ROOT), **variables}
        argv = [*(prefix or [sys.executable, str(JOB)]), scenario, str(num_ranks), str(self.out)]
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def notes(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))}

    def left(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if self.token.encode() in (folder / "environ").read_bytes() and state != "Z":
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def job(tmp_path: Path) -> Any:
    job = Job(tmp_path)
    yield job
    left = job.left()
    for _ in range(30):
        if not left:
            return
        time.sleep(0.1)
        left = job.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    pytest.fail(f"processes left behind: {left}")


def check_exchange(notes: dict[str, dict[str, Any]], kind: str, size: int) -> None:
    assert sorted(notes) == [str(rank) for rank in range(size)]
    for name, note in notes.items():
        assert note["first"] == [f"from {rank}" for rank in range(size)]
        assert note["sizes"] == [6 + rank * 600_000 for rank in range(size)]
        assert note["shared"] == 300_000
        assert note["commands"] == ([] if name == "0" else ["do 0", "do 1", "do 2"])
        assert (note["kind"], note["size"]) == (kind, size)
        assert note["local"] == [int(name), size]
        assert len(note["hosts"]) == size


# One rank


def test_single() -> None:
    with connect(env={}) as bootstrap:
        assert (bootstrap.kind, bootstrap.rank, bootstrap.world_size) == ("single", 0, 1)
        assert bootstrap.allgather(b"a") == [b"a"]
        assert bootstrap.broadcast(b"b") == b"b"
        bootstrap.barrier()
        assert agree(bootstrap, lambda: 5) == 5
        agree_same(bootstrap, "models", {"--model": "a"})

        def fail() -> None:
            raise UsageError("wrong")

        with pytest.raises(UsageError, match=r"^wrong$"):
            agree(bootstrap, fail)
    bootstrap.close()
    with pytest.raises(RuntimeError, match="closed"):
        bootstrap.allgather(b"")


def test_pack_is_undone_by_unpack() -> None:
    for parts in ([], [b""], [b"a", b"", b"x" * 1000]):
        assert unpack(pack(parts)) == parts


# Ranks that rank 0 starts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_local_exchange(job: Job, num_ranks: int) -> None:
    done = job.run("exchange", num_ranks)
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), "local", num_ranks)
    assert done.stdout.splitlines() == ["stdout of rank 0"]
    for rank in range(1, num_ranks):
        assert f"stdout of rank {rank}" in done.stderr


def test_local_started_by_a_thread_that_ends(job: Job) -> None:
    done = job.run("short_thread", 3)
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), "local", 3)


def test_agree_when_some_ranks_fail(job: Job) -> None:
    job.run("one_fails", 3)
    notes = job.notes()
    assert {note["type"] for note in notes.values()} == {"ModelError"}
    assert {note["code"] for note in notes.values()} == {2}
    assert notes["0"]["text"] == "rank 1: no config.json on 1"
    assert notes["1"]["text"] == "no config.json on 1"
    assert notes["2"]["text"] == "no config.json on 2"


def test_agree_when_all_ranks_fail(job: Job) -> None:
    job.run("all_fail", 3)
    assert [note["text"] for note in job.notes().values()] == ["no config.json"] * 3


def test_agree_tells_of_bugs(job: Job) -> None:
    job.run("bug", 3)
    notes = job.notes()
    assert notes["1"]["type"] == "KeyError"
    for rank in ("0", "2"):
        assert notes[rank]["text"] == "rank 1: unexpected KeyError: 'key'"


def test_agree_same(job: Job) -> None:
    job.run("same", 3)
    notes = job.notes()
    assert len(notes) == 3
    for note in notes.values():
        assert note["type"] == "UsageError"
        assert note["text"] == (
            "ranks were given different models: --model: rank 2 differs from rank 0 ('b' on rank 2, 'a' on rank 0); "
            "start every rank with the same --model"
        )


@pytest.mark.parametrize("scenario", ["follower_killed", "follower_killed_at_command"])
def test_killed_follower_is_named_on_every_rank(job: Job, scenario: str) -> None:
    job.run(scenario, 4)
    notes = job.notes()
    assert sorted(notes) == ["0", "1", "3"]
    for note in notes.values():
        assert note["type"] == "RankLostError"
        assert note["text"].startswith("rank 2 (pid ") and note["text"].endswith("was killed by SIGKILL")
        assert note["again"] == note["text"]


def test_killed_rank_0_ends_the_others(job: Job) -> None:
    done = job.run("hub_killed", 4)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: {"1", "2"} <= set(job.notes()))
    notes = job.notes()
    assert sorted(notes) == ["1", "2"]  # Rank 3 slept, and was ended by the kernel.
    for note in notes.values():
        assert (note["type"], note["text"]) == ("RankLostError", "rank 0 left or died")


def test_follower_that_exits_before_it_joins(job: Job) -> None:
    done = job.run("exit_early", 4)
    assert done.returncode == 4
    text = job.notes()["error0"]["text"]
    assert text.startswith("rank 2 (pid ") and text.endswith("exited with status 7")


def test_silent_follower_is_named_after_the_timeout(job: Job) -> None:
    start = time.monotonic()
    job.run("silent", 3, DISTMK_BOOTSTRAP_TIMEOUT_S="2")
    assert time.monotonic() - start < 30  # Rank 1 sleeps on, and is terminated.
    notes = job.notes()
    assert sorted(notes) == ["0", "2"]
    for note in notes.values():
        assert note["text"] == "rank 1 did not answer rank 0 within 2 s"


def test_close_kills_a_follower_that_will_not_leave(job: Job) -> None:
    done = job.run("stubborn", 3)
    assert done.returncode == 0, done.stderr
    assert job.notes()["0"]["close_s"] < 8


def test_close_lets_followers_finish(job: Job) -> None:
    job.run("slow_to_leave", 3)
    assert sorted(job.notes()) == ["1", "2"]


def test_ctrl_c_leaves_the_followers_alone(job: Job) -> None:
    done = job.run("interrupted", 3)
    assert done.returncode == 0, done.stderr
    assert [note["gathered"] for note in job.notes().values()] == [3, 3, 3]


def test_fork_of_rank_0_does_not_end_the_job(job: Job) -> None:
    done = job.run("forked", 2)
    assert done.returncode == 0, done.stderr
    assert [note["gathered"] for note in job.notes().values()] == [2, 2]


def test_abort_ends_followers_at_once(job: Job) -> None:
    start = time.monotonic()
    job.run("aborted", 3)
    assert time.monotonic() - start < 20


def test_program_that_cannot_be_started() -> None:
    with pytest.raises(UsageError, match="cannot start /no/such/program: No such file"):
        connect(2, follower_argv=["/no/such/program"], env={})


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


# Launchers


def mpirun() -> list[str]:
    pytest.importorskip("mpi4py")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" not in version:
        return [found, "-n", "3", sys.executable]
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [found, *root, "--oversubscribe", "--bind-to", "none", "-n", "3", sys.executable]


def torchrun() -> list[str]:
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_mpirun_exchange(job: Job) -> None:
    done = job.run("exchange", 0, [*mpirun(), str(JOB)])
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), "mpi", 3)


def test_mpirun_agree(job: Job) -> None:
    done = job.run("one_fails", 0, [*mpirun(), str(JOB)])
    assert done.returncode == 0, done.stderr
    assert job.notes()["0"]["text"] == "rank 1: no config.json on 1"


def test_mpirun_silent_rank_is_named(job: Job) -> None:
    done = job.run("silent", 0, [*mpirun(), str(JOB)], DISTMK_BOOTSTRAP_TIMEOUT_S="2")
    assert done.returncode != 0  # The others leave without MPI_Finalize, which makes mpirun end rank 1.
    notes = job.notes()
    assert {notes[rank]["text"] for rank in ("0", "2") if rank in notes} == {"rank 1 did not answer within 2 s"}


def test_mpirun_ends_all_when_a_rank_is_killed(job: Job) -> None:
    assert job.run("follower_killed", 0, [*mpirun(), str(JOB)]).returncode != 0


def test_mpirun_abort(job: Job) -> None:
    assert job.run("aborted", 0, [*mpirun(), str(JOB)]).returncode == 9


def test_mpirun_and_other_number_of_ranks(job: Job) -> None:
    done = job.run("exchange", 2, [*mpirun(), str(JOB)])
    assert done.returncode != 0
    assert job.notes()["error0"]["text"] == (
        "--ranks 2 was given, but the MPI launcher started 3 ranks; "
        "leave --ranks out under a launcher, or give the same number"
    )


def test_torchrun_exchange(job: Job) -> None:
    done = job.run("exchange", 0, [*torchrun(), str(JOB)], TMPDIR=str(job.folder))
    assert done.returncode == 0, done.stderr
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
    done = job.run("exchange", 0, ["bash", "-c", shell, "bash", sys.executable, str(JOB)])
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), "torch", 2)


def test_srun_variables_alone(job: Job) -> None:
    pytest.importorskip("torch")
    shell = (
        "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=$$ SLURM_STEP_ID=0; "
        'SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait $! && exit $code'
    )
    done = job.run("exchange", 0, ["bash", "-c", shell, "bash", sys.executable, str(JOB)])
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), "slurm", 2)


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
        mpirun()
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copytree(ROOT / "distmk" / "bootstrap", tmp_path / "distmk" / "bootstrap")
    shutil.copy(ROOT / "distmk" / "errors.py", tmp_path / "distmk")
    (tmp_path / "distmk" / "__init__.py").touch()
    shutil.copy(JOB, tmp_path / "distmk" / "__main__.py")
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
    assert done.returncode == 0, done.stderr
    check_exchange(job.notes(), kind, 2)
