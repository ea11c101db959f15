"""Runs `distmk` as its users do, under every launcher, and checks that no process or shared memory is left."""

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
QUICK_COMPILER = {"DISTMK_CXX": str(ROOT / "tests" / "support" / "quick_compiler.sh")}
"""The environment of tests that build a runtime of their own, which they hardly use."""
SHARED_MEMORY = Path("/dev/shm")
# Prefix of the segments that tests make themselves; tests that run beside them leave those alone.
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
    """mpirun and the flags that this machine needs, up to `-n`. Skips the test where there is none."""
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
    """For a Python command: torchrun starts the interpreter itself."""
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return lambda command: [*torchrun, *command[1:]]


@dataclass
class Finished:
    """Output and exit status of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def own_lines(self) -> list[str]:
        """The lines of stderr that distmk wrote, without those of launchers."""
        return [line for line in self.stderr.splitlines() if line.startswith("distmk:")]

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one a line."""
        return [json.loads(line) for line in self.stdout.splitlines()]


@dataclass
class Runner:
    """Starts commands in `folder` with a time limit, and with a mark by which `left` finds processes that outlive them."""

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    timeout_s: float = 120.0
    segments_before: list[str] = field(default_factory=lambda: abandoned_segments())

    def environment(self) -> dict[str, str]:
        """Of a command, with the mark."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_VARIABLES) or k == "DISTMK_CACHE"}
        marks = {"DISTMK_PROGRESS": "0"}  # what takes long depends on the machine
        marks |= {"TEST_TOKEN": self.token, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        # MPI's shared memory outlives a killed rank, so it is kept out of /dev/shm.
        marks["OMPI_MCA_btl_sm_backing_directory"] = str(self.folder)
        return inherited | marks

    def start(self, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(command),
            env=self.environment() | (env or {}),
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
        """The same command under several launchers, side by side."""
        running = [self.start(launcher([*DISTMK, *arguments]), env) for launcher in launchers]
        return [self.finish(process) for process in running]

    def left(self) -> list[int]:
        """Processes that still run, of those started here and their descendants."""
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
        """Fail if after `wait_s` seconds a process still runs, or a shared memory segment still has no living owner.

        A segment of a test that runs beside this one may have none for a moment.
        """
        deadline = time.monotonic() + wait_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
        while (segments := set(abandoned_segments()) - set(self.segments_before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not segments, f"shared memory left behind: {segments}"


def made_segment(kind: str) -> Path:
    """Path for a segment that looks like one of a run."""
    return SHARED_MEMORY / f"{MADE}{kind}-0"


def abandoned_segments() -> list[str]:
    """Segments of distmk, other than `made_segment`s, without a living owner: an owner holds a lock on its segment."""
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
    """Fail unless stderr is one line with all `texts`, stdout is empty, and the exit status is `status`."""
    assert "Traceback" not in finished.stderr, finished.stderr
    assert finished.status == status, finished
    assert finished.stdout == "" or others_may_speak, finished.stdout
    lines = finished.own_lines if others_may_speak else finished.stderr.splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("distmk: "), lines[0]
    for text in texts:
        assert text in lines[0], f"{text!r} is not in {lines[0]!r}"
