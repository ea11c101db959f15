"""The symmetric heap of the host twin: one shared-memory segment for each rank, mapped by all ranks of the host.

A segment has a name only while the ranks open each other's. Its owner holds a lock on it for life. The operating system drops
the lock when the process dies in any way: so peers notice, and so a later run tells a leftover from a segment in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import time
from pathlib import Path

from distmk.abi import Control
from distmk.bootstrap import Bootstrap, agree
from distmk.errors import UsageError

FOLDER = Path("/dev/shm")
LEAVE_POLL_S = 0.001


def remove_leftovers(folder: Path = FOLDER) -> int:
    """Unlink segments of this user whose owner died before it had unlinked them; returns how many."""
    removed = 0
    for path in folder.glob(f"distmk-{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
    return removed


def _name(fd: int, path: Path) -> None:
    """Link an unnamed file of FOLDER to `path`."""
    folder = os.open(FOLDER, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With src_dir_fd, although both paths are absolute, Python calls linkat, which follows the link under /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


class SharedHeap:
    """This rank's heap and its peers', each `num_bytes` long. `bases[r]`: the address of rank r's heap in this process.

    Collective. UsageError on every rank: no room in shared memory, or ranks on several machines.
    """

    def __init__(self, bootstrap: Bootstrap, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.rank = bootstrap.rank
        self._maps: list[mmap.mmap] = []
        self._fds: list[int] = []
        job = bootstrap.broadcast(secrets.token_hex(8).encode() if bootstrap.rank == 0 else None).decode()
        names = [f"distmk-{os.getuid()}-{job}-{rank}" for rank in range(bootstrap.world_size)]
        own = FOLDER / names[self.rank]
        try:
            own_fd = agree(bootstrap, lambda: self._create(own))
            self._fds = agree(bootstrap, lambda: self._open_all(names, own_fd))
            self._maps = agree(bootstrap, lambda: [mmap.mmap(fd, num_bytes) for fd in self._fds])
        finally:
            own.unlink(missing_ok=True)
        self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(mapped)) for mapped in self._maps]

    def _create(self, path: Path) -> int:
        remove_leftovers()
        try:
            # Locked before it has a name, so that no other process can take it for a leftover.
            fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, self.num_bytes)
            _name(fd, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise UsageError(f"cannot make shared memory in {FOLDER}: {error.strerror}") from None
            free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
            raise UsageError(
                f"{FOLDER} has {free >> 20} MiB free, a rank's heap needs {self.num_bytes >> 20} MiB; "
                "make room or use fewer ranks"
            ) from None
        return fd

    def _open_all(self, names: list[str], own_fd: int) -> list[int]:
        fds = []
        for rank, name in enumerate(names):
            if rank == self.rank:
                fds.append(own_fd)
                continue
            try:
                fds.append(os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC))
            except FileNotFoundError:
                raise UsageError(
                    f"rank {rank} shares no memory with rank {self.rank}: the host backend spans one machine; "
                    "start all ranks on one, or use --backend cuda"
                ) from None
        return fds

    def clear(self, num_bytes: int) -> None:
        """Zero the first `num_bytes` of this rank's heap."""
        ctypes.memset(self.bases[self.rank], 0, num_bytes)

    def lost_ranks(self) -> list[int]:
        """Ranks whose process died; if there are none, ranks that left in order."""
        lost, left = self._gone()
        return lost or left

    def leave_together(self, timeout_s: float) -> bool:
        """Announce that this rank leaves, and wait until all do. False: one died, or did not in `timeout_s`."""
        Control.from_address(self.bases[self.rank]).left = 1
        until = time.monotonic() + timeout_s
        while not all(Control.from_address(base).left for base in self.bases):
            if self._gone()[0] or time.monotonic() > until:
                return False
            time.sleep(LEAVE_POLL_S)
        return True

    def _gone(self) -> tuple[list[int], list[int]]:
        """Ranks whose process is gone: those that died, and those that left in order."""
        lost: list[int] = []
        left: list[int] = []
        for rank, fd in enumerate(self._fds):
            if rank == self.rank:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_UN)
                (left if Control.from_address(self.bases[rank]).left else lost).append(rank)
            except OSError:
                pass
        return lost, left

    def close(self) -> None:
        """Unmap all heaps; addresses and arrays in them must no longer be used."""
        if self.bases:
            Control.from_address(self.bases[self.rank]).left = 1
        self.bases = []
        for mapped in self._maps:
            with contextlib.suppress(BufferError):  # an array still refers to it; unmapped when the process ends
                mapped.close()
        for fd in self._fds:
            os.close(fd)
        self._maps, self._fds = [], []
