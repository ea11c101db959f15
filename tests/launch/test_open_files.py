"""A limit on open files that is too low is named before anything is started, and where it is met."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
from support.faults import generate_command
from support.helpers import Runner, assert_one_line

from distmk import open_files
from distmk.bootstrap import connect
from distmk.errors import ModelError, UsageError
from distmk.user_files import open_regular


@pytest.mark.parametrize("limit", [16, 44])
def test_few_files(runner: Runner, endless: Path, limit: int) -> None:
    """Too few for four ranks, whose modules could not even be imported; 44 are enough for one."""
    command = generate_command(endless, "--workers", "1", tokens=4)
    limited = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *command, "--ranks"]
    alone, together = runner.start([*limited, "1"]), runner.start([*limited, "4"])
    done = runner.finish(together)
    assert_one_line(done, f"may open at most {limit} files, but each of 4 ranks needs", "ulimit -n 4096")
    done = runner.finish(alone)
    if limit == 16:
        assert_one_line(done, f"may open at most {limit} files, but 1 rank needs", "ulimit -n 4096")
    else:
        assert done.status == 0, done.stderr


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = len(os.listdir("/proc/self/fd")) + 2 * open_files.FILES_OF_A_RANK + open_files.SPARE_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed - 1, 10**6))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process was started"))
    with pytest.raises(UsageError, match=f"at most {needed - 1} files, but each of 2 ranks needs {needed}"):
        connect(2, env={})
    for limit in (needed, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        open_files.check_open_files(2)


def test_met_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a model of more files than are allowed."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path = tmp_path / "model-00099-of-00100.safetensors"
    path.touch()
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(
        ModelError, match=r"cannot be read: Too many open files: at most \d+ may be open here; raise it"
    ):
        open_regular(path)
