"""Shared memory that earlier runs left behind, or that is too small."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import Runner, abandoned_segments, made_segment

from distmk.backends.host.shm import SharedHeap, open_segment, remove_leftovers
from distmk.bootstrap.single import SingleBootstrap
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)


def test_leftovers(runner: Runner, command: Callable[..., list[str]]) -> None:
    """The next run removes a dead run's segment, leaves a living one's alone, and works beside both."""
    dead, living = made_segment("dead"), made_segment("living")
    try:
        dead.write_bytes(b"x" * 8192)
        with living.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = runner.run([*command(tokens=4), "--ranks", "2"])
            assert done.status == 0, done.stderr
            assert not dead.exists() and living.exists()
        assert remove_leftovers() >= 1 and not living.exists() and not abandoned_segments()
    finally:
        dead.unlink(missing_ok=True)
        living.unlink(missing_ok=True)


def test_what_is_removed(tmp_path: Path) -> None:
    dead, living, other = (tmp_path / f"distmk-{owner}-0" for owner in (f"{os.getuid()}-a", f"{os.getuid()}-b", "x-c"))
    for path in (dead, living, other):
        path.write_bytes(b"x")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_leftovers(tmp_path) == 1
        assert not dead.exists() and living.exists() and other.exists()
    assert remove_leftovers(tmp_path) == 1 and not living.exists()


def test_what_only_looks_like_a_leftover_is_left_alone(tmp_path: Path) -> None:
    """A pipe is not waited for, and a link is not followed."""
    fifo, link, target = tmp_path / f"distmk-{os.getuid()}-a", tmp_path / f"distmk-{os.getuid()}-b", tmp_path / "mine"
    os.mkfifo(fifo)
    target.touch()
    link.symlink_to(target)
    assert remove_leftovers(tmp_path) == 0
    assert fifo.exists() and link.is_symlink() and target.exists()


def test_segments_that_no_rank_made_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    os.close(open_segment(path, 4096))
    with pytest.raises(FileNotFoundError):
        open_segment(tmp_path / "none", 4096)

    def refuses(path: Path) -> None:
        with pytest.raises(UsageError, match="is no shared memory of this job"):
            open_segment(path, 4096)

    path.chmod(0o622)
    refuses(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for other in ("link", "fifo", "."):
        refuses(tmp_path / other)
    with pytest.raises(UsageError, match="4097 bytes"):
        open_segment(path, 4097)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    refuses(path)


def test_no_room_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"/dev/shm has \d+ MiB free, a rank's heap needs 3 MiB; make room"):
        SharedHeap(SingleBootstrap(5.0), 3 << 20)
    assert not abandoned_segments()


def test_no_room(runner: Runner, command: Callable[..., list[str]]) -> None:
    """A /dev/shm of 16 KiB, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    mount = "mount -t tmpfs -o size=16k tmpfs /dev/shm"
    if not unshare or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = runner.run([unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command(tokens=4), "--ranks", "2"])
    assert done.status == 2 and len(done.own_lines) == 1, done.stderr
    assert re.search(r"/dev/shm has \d+ MiB free, a rank's heap needs \d+ MiB; make room", done.own_lines[0]), (
        done.stderr
    )
