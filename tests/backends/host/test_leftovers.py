"""Shared memory that earlier runs left behind, or that cannot be used."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import Runner, abandoned_segments, assert_one_line, made_segment

from distmk.backends.host.segments import open_segment, remove_leftovers
from distmk.backends.host.shm import SharedHeap
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
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UsageError, match=r"/dev/shm has \d+ MiB free, 1 rank needs 3072 KiB there; make room"):
        SharedHeap(SingleBootstrap(5.0), 3 << 20)
    assert not abandoned_segments() and os.listdir("/proc/self/fd") == before


def test_no_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(UsageError, match=r"cannot map 1 x 3 MiB of shared memory .* raise the limit"):
        SharedHeap(SingleBootstrap(5.0), 3 << 20)
    assert not abandoned_segments()


DEV = "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9"
FAULTS = {
    "mount -t tmpfs -o size=4k tmpfs /dev/shm": r"/dev/shm has \d+ KiB free, .* needs? \d+ KiB there; make room",
    "mount -t tmpfs -o size=1m,nr_inodes=1 tmpfs /dev/shm": "/dev/shm has no room for another file, .* make room",
    "mount -t tmpfs -o ro tmpfs /dev/shm": "in /dev/shm: Read-only file system; ranks need a tmpfs there",
    DEV: "in /dev/shm: No such file or directory; ranks need a tmpfs there",
    f"{DEV} && touch /dev/shm": "in /dev/shm: Not a directory; ranks need a tmpfs there",
}


def test_unusable_shared_memory(runner: Runner, command: Callable[..., list[str]]) -> None:
    """In mount namespaces of their own."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-m", "sh", "-c", next(iter(FAULTS))], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    running = [
        (
            says,
            runner.start([unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command("--ranks", n, tokens=4)]),
        )
        for n in ("1", "2")
        for mount, says in FAULTS.items()
    ]
    for says, process in running:
        done = runner.finish(process)
        assert_one_line(done)
        assert re.search(says, done.stderr), done.stderr
