"""Segments of shared memory: unnamed files of a tmpfs. They have a name only while the ranks open each other's segments.

The owner of a segment holds a lock on it as long as it lives, so a later run can tell a leftover from a segment in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from distmk.errors import UsageError
from distmk.open_files import reason

FOLDER = Path("/dev/shm")
MODE = 0o600
NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
# For a file that another program may have made: do not follow a link, do not wait for a pipe.
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def segment_path(job: str, rank: int) -> Path:
    """The name of a rank's segment."""
    return FOLDER / f"distmk-{os.getuid()}-{job}-{rank}"


def make_segment(path: Path, num_bytes: int) -> int:
    """Make a zeroed segment, locked by this process. UsageError: no room in FOLDER, or it cannot be used."""
    with contextlib.ExitStack() as stack:
        try:
            # Locked before it has a name, so that no other process takes it for a leftover.
            fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
            stack.callback(os.close, fd)
            os.fchmod(fd, MODE)  # whatever the umask is
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, num_bytes)  # otherwise the first use of a missing page could be a SIGBUS
            _name(fd, path)
        except OSError as error:
            raise no_room(num_bytes) if error.errno in NO_SPACE else unusable(error) from None
        stack.pop_all()
    return fd


def remove_leftovers(folder: Path = FOLDER) -> int:
    """Unlink segments of this user whose owners died before they unlinked them. Returns how many."""
    removed = 0
    for path in folder.glob(f"distmk-{os.getuid()}-*"):
        try:
            fd = os.open(path, OPEN_FLAGS)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_own(os.fstat(fd)):
                path.unlink(missing_ok=True)
                removed += 1
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
    return removed


def unusable(error: OSError) -> UsageError:
    """The error to raise if a folder of shared memory cannot be used at all."""
    return UsageError(
        f"cannot make shared memory in {FOLDER}: {reason(error)}; ranks need a tmpfs there that this user may write"
    )


def no_room(num_bytes: int, num_ranks: int = 1) -> UsageError:
    """The error to raise if a folder of shared memory has no room for the heaps of `num_ranks`, `num_bytes` in all."""
    status = os.statvfs(FOLDER)
    ranks = "1 rank needs" if num_ranks == 1 else f"{num_ranks} ranks need"
    advice = "make room (in Docker: --shm-size), or use fewer ranks on this host"
    if status.f_files and not status.f_favail:
        return UsageError(f"{FOLDER} has no room for another file, {ranks} one each; {advice}")
    free = status.f_bavail * status.f_frsize
    return UsageError(f"{FOLDER} has {_readable(free)} free, {ranks} {_readable(num_bytes)} there; {advice}")


def _readable(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 10 << 20 else f"{-(-num_bytes >> 10)} KiB"


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def open_segment(path: Path, num_bytes: int) -> int:
    """Open the segment of another rank.

    FileNotFoundError: it does not exist. UsageError: the file is not one that a rank makes.
    """
    refusal = f"{path} is no shared memory of this job: expected a file of {num_bytes} bytes, owned and read by this user alone"
    try:
        fd = os.open(path, OPEN_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{refusal} ({reason(error)})") from None
    status = os.fstat(fd)
    if not _is_own(status) or stat.S_IMODE(status.st_mode) != MODE or status.st_size != num_bytes:
        os.close(fd)
        raise UsageError(refusal)
    return fd


def _name(fd: int, path: Path) -> None:
    """Link an unnamed file of FOLDER to `path`."""
    folder = os.open(FOLDER, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Both paths are absolute, but with src_dir_fd Python calls linkat, which follows the link under /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
