"""Running `distmk` as its users do, under every launcher, and seeing that nothing of it is left."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTMK = [sys.executable, "-m", "distmk"]
SHARED_MEMORY = Path("/dev/shm")
# Begins the name of a segment that a test has made, which tests beside it leave alone.
MADE = f"distmk-{os.getuid()}-test"
LAUNCH_VARIABLES = ("DISTMK_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_")

Launcher = Callable[[list[str]], list[str]]


def alone(command: list[str]) -> list[str]:
    return command


def with_ranks(num_ranks: int) -> Launcher:
    return lambda command: [*command, "--ranks", str(num_ranks)]


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    return "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout


def mpirun_command() -> list[str]:
    """mpirun with what it needs on this machine, up to its `-n`."""
    pytest.importorskip("mpi4py")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun")
    if not is_open_mpi(found):
        return [found]
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [found, *root, "--oversubscribe", "--bind-to", "none"]


def under_mpirun(num_ranks: int) -> Launcher:
    return lambda command: [*mpirun_command(), "-n", str(num_ranks), *command]


def under_torchrun(num_ranks: int) -> Launcher:
    """`command` is a Python command: torchrun starts the Python itself."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return lambda command: [*torchrun, *command[1:]]


@dataclass
class Finished:
    """What a command printed, and its exit status."""

    status: int
    stdout: str
    stderr: str

    @property
    def own_lines(self) -> list[str]:
        """What distmk itself wrote to stderr; launchers add their own comments."""
        return [line for line in self.stderr.splitlines() if line.startswith("distmk:")]

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


@dataclass
class Runner:
    """Starts commands in `folder`, each bounded in time and marked, so that `left` finds what outlived it."""

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    timeout_s: float = 120.0
    segments_before: list[str] = field(default_factory=lambda: abandoned_segments())

    def start(self, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_VARIABLES) or k == "DISTMK_CACHE"}
        marks = {"TEST_TOKEN": self.token, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        # MPI's own shared memory outlives a rank that is killed: keep it out of /dev/shm.
        marks["OMPI_MCA_btl_sm_backing_directory"] = str(self.folder)
        return subprocess.Popen(
            list(command),
            env=inherited | marks | (env or {}),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> Finished:
        try:
            stdout, stderr = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {self.timeout_s:g} s: {process.args}")
        return Finished(process.returncode, stdout, stderr)

    def run(self, command: Sequence[str], env: dict[str, str] | None = None) -> Finished:
        return self.finish(self.start(command, env))

    def distmk(self, *arguments: str, launcher: Launcher = alone, env: dict[str, str] | None = None) -> Finished:
        """Run `python -m distmk` with `arguments`."""
        return self.run(launcher([*DISTMK, *arguments]), env)

    def distmk_under(
        self, launchers: Sequence[Launcher], *arguments: str, env: dict[str, str] | None = None
    ) -> list[Finished]:
        """The same command under several launchers at once."""
        running = [self.start(launcher([*DISTMK, *arguments]), env) for launcher in launchers]
        return [self.finish(process) for process in running]

    def left(self) -> list[int]:
        """Processes started here, or by what was started here, that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if self.token.encode() in (folder / "environ").read_bytes() and state != "Z":
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def check_nothing_left(self, wait_s: float = 5.0) -> None:
        """Fail if a process of ours still runs, or shared memory is left that nobody holds."""
        deadline = time.monotonic() + wait_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
        segments = set(abandoned_segments()) - set(self.segments_before)
        assert not segments, f"shared memory left behind: {segments}"


def made_segment(kind: str) -> Path:
    """Where a test may put a segment that looks like a run's."""
    return SHARED_MEMORY / f"{MADE}{kind}-0"


def abandoned_segments() -> list[str]:
    """Segments of distmk whose owner is gone: it holds a lock on them while it lives. But for `made_segment`s."""
    found = []
    for path in SHARED_MEMORY.glob("distmk-*"):
        if path.name.startswith(MADE):
            continue
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(path.name)
        except OSError:
            continue
    return found


def assert_one_line(finished: Finished, *texts: str, status: int = 2, others_may_speak: bool = False) -> None:
    """One line on stderr that holds all `texts`, nothing on stdout, and the exit status of a user's mistake."""
    assert "Traceback" not in finished.stderr, finished.stderr
    assert finished.status == status, finished
    assert finished.stdout == "" or others_may_speak, finished.stdout
    lines = finished.own_lines if others_may_speak else finished.stderr.splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("distmk: "), lines[0]
    for text in texts:
        assert text in lines[0], f"{text!r} is not in {lines[0]!r}"
