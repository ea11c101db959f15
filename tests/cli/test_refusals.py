"""Whichever rank meets a mistake first says so, in one line; launchers end the others as soon as one has ended."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid

import pytest
from support.helpers import Runner, under_mpirun, under_torchrun

from distmk.cli import exit_status, siblings
from distmk.errors import Interrupted, OwnUsageError, RankLostError, UsageError

pytestmark = pytest.mark.timeout(120)

CHECK = [
    sys.executable,
    "-m",
    "distmk",
    "generate",
    "--model",
    "qwen3-8b",
    "--load-format",
    "dummy",
    "--prompt-ids",
    "1",
]
NO_KEY = "DISTMK_AUTHKEY must hold 32 hexadecimal digits or more"


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("distmk: ")]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_mistake_that_keeps_ranks_from_joining(launcher: str, runner: Runner) -> None:
    """All ranks meet it, before they are connected. Under MPI rank 0 waits for the others, and may be the last to say it."""
    start = under_torchrun(3) if launcher == "torchrun" else under_mpirun(3)
    done = runner.run(start(CHECK), {"DISTMK_AUTHKEY": "no key"})
    assert done.status != 0
    assert 1 <= len(lines(done.stderr)) <= (1 if launcher == "torchrun" else 2), done.stderr
    assert all(re.match(f"distmk: (rank [12]: )?{NO_KEY}", line) for line in lines(done.stderr))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_stays_silent(late: int, runner: Runner) -> None:
    """Rank 0 too: the line of the other one has been there for a while."""
    shell = (
        "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1; "
        f'(sleep {0.7 * late}; RANK=1 exec "$@") & (sleep {0.7 * (1 - late)}; RANK=0 exec "$@"); code=$?; wait $!; exit $code'
    )
    done = runner.run(["bash", "-c", shell, "bash", *CHECK], {"DISTMK_AUTHKEY": "no key"})
    assert done.status == 2
    (line,) = lines(done.stderr)
    assert line.startswith(f"distmk: {'rank 1: ' if late == 0 else ''}{NO_KEY}")


def test_a_rank_without_its_launcher_says_why(runner: Runner) -> None:
    done = runner.run(CHECK, {"RANK": "1", "WORLD_SIZE": "4"})
    assert done.status == 2
    (line,) = lines(done.stderr)
    assert line.startswith("distmk: rank 1: RANK, WORLD_SIZE set without MASTER_ADDR, MASTER_PORT")


@pytest.mark.parametrize("kind", [UsageError, OwnUsageError, RankLostError, Interrupted])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_who_reports(
    kind: type[UsageError], rank: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 what all share; each rank what it met itself, and the loss of another."""
    monkeypatch.setattr(exit_status, "_REPORT_S", 0.0)
    monkeypatch.setattr(exit_status, "_SAME_MISTAKE_S", 0.0)
    monkeypatch.setattr(exit_status, "launcher_rank", lambda: rank or 0)
    monkeypatch.setattr(siblings, "may_exist", lambda: rank is not None)
    assert exit_status.report(kind(f"wrong {kind} {rank}")) == kind.exit_code
    said = capsys.readouterr().err
    own = kind in (OwnUsageError, RankLostError)
    assert said == (
        f"distmk: {'rank 1: ' if rank and kind is OwnUsageError else ''}wrong {kind} {rank}\n"
        if own or not rank
        else ""
    )


def test_a_launchers_signal_does_not_hide_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        try:
            raise UsageError("the reason")
        finally:
            raise KeyboardInterrupt

    assert exit_status.status_of(run) == 2
    assert capsys.readouterr().err == "distmk: the reason\n"


def test_one_process_of_a_host_says_a_text() -> None:
    env, other_job = ({"MASTER_ADDR": "a", "MASTER_PORT": uuid.uuid4().hex} for _ in range(2))
    assert siblings.is_first_to_say("x", env)
    assert not siblings.is_first_to_say("x", env)
    assert siblings.is_first_to_say("y", env)
    assert siblings.is_first_to_say("x", other_job)
    code = f"from distmk.cli.siblings import is_first_to_say as say; print(say('x', {env!r}), say('z', {env!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
