"""Files of the cache: which files may be loaded, and how a file is published.

A damaged library kills the process that loads it, and a file that a stranger may write is the stranger's code. So a
file is loaded only if it is regular, belongs to this user or to root, cannot be written by others, and has the SHA-256
digest in the file beside it (suffix .sha256, as `sha256sum` writes it). The
same rule of owner and mode holds for the folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distmk.errors import BuildError
from distmk.user_files import kind_of

MISSING, NO_DIGEST = "is not there", "has no digest beside it"
MAX_BYTES = 1 << 30  # limit for a file of the cache
MAX_TEXT_BYTES = 1 << 16  # limit for a digest or a compiler's report
LOCK_WAIT_S = 300.0  # longer than any compilation
PROBE_BYTES = 1 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class CacheError(BuildError):
    """The cache folder cannot be written. Its files can be read."""


class _Untrusted(Exception):
    """A file that must not be loaded."""


def fault_of(path: Path, own: bool = True) -> str | None:
    """Why the file at `path` must not be loaded, as words to follow its name (`MISSING`: there is no file); None: it may be.

    `own`: it must have the right owner and mode.
    """
    try:
        digest = _digest(path, own)
        recorded = read_text(_digest_of(path), own)
    except _Untrusted as untrusted:
        return str(untrusted)
    if recorded is None:
        return NO_DIGEST
    return None if recorded.split()[:1] == [digest] else "differs from its digest"


def read_text(path: Path, own: bool = True) -> str | None:
    """The text of a small file; None if there is no such file. `own`: it must have the right owner and mode."""
    try:
        with _opened(path, MAX_TEXT_BYTES, own) as (fd, size):
            return os.read(fd, size).decode()
    except (_Untrusted, UnicodeDecodeError):
        return None


def folder_fault(folder: Path) -> str | None:
    """Why files of `folder` must not be loaded, as words to follow its name; None: they may be, or it does not exist."""
    try:
        info = folder.stat()
    except OSError:
        return None
    return _fault_of_owner(info) if stat.S_ISDIR(info.st_mode) else "is not a folder"


def own_folder(folder: Path) -> Path:
    """Returns `folder`, and makes it with mode 0700 if it does not exist.

    CacheError: it cannot be written. BuildError: `folder_fault`.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        require_trusted(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise cannot_write(folder, error) from None


def require_trusted(folder: Path) -> None:
    """Raise BuildError if files of the cache folder must not be loaded."""
    if fault := folder_fault(folder):
        change = f"chmod go-w {folder}, or " if "may be written" in fault else ""
        raise BuildError(f"the cache folder {folder} {fault}; {change}set DISTMK_CACHE to a folder of your own")


def cannot_write(folder: Path, error: OSError) -> CacheError:
    """The error to raise if `error` occurred in a cache folder."""
    if error.errno in NO_SPACE:
        return CacheError(
            f"no space left in the cache folder {folder}; make room, or set DISTMK_CACHE to a folder of another disk"
        )
    reason = error.strerror or str(error)
    return CacheError(f"cannot write to the cache folder {folder} ({reason}); set DISTMK_CACHE to one you own")


def tells_of_no_space(text: str) -> bool:
    """Whether a tool's message in English says that the disk is full."""
    return any(os.strerror(number) in text for number in NO_SPACE)


def is_full(folder: Path) -> bool:
    """Whether `folder` has no space left for the files that a compiler writes."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.errno in NO_SPACE
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`. The lock saves work, but nothing depends on it.

    After LOCK_WAIT_S, for example if the process that holds the lock is stopped, and on file systems without locks, go
    on without it. OSError: the lock file cannot be made.
    """
    fd = _open_lock(path)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def publish(made: Path, target: Path) -> None:
    """Move `made` to `target`, on the same file system, with its digest and, if there is one, its report (suffix .json).

    A reader finds all of them, or a file that differs from its digest, even after a power failure.
    """
    digest, report = made.with_name(f"{made.name}.sha256"), made.with_suffix(".json")
    digest.write_text(f"{_digest(made, own=False)}  {target.name}\n")
    pairs = [(report, target.with_suffix(".json"))] if report.exists() else []
    pairs += [(digest, _digest_of(target)), (made, target)]
    for source, _ in pairs:
        _settle(source)
    for source, goal in pairs:
        if stat.S_ISDIR(_mode(goal)):
            shutil.rmtree(goal)
        os.replace(source, goal)
    _sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, its digest and its lock. OSError: it cannot be removed."""
    path.unlink()
    for beside in (_digest_of(path), path.with_name(f"{path.name}.lock")):
        beside.unlink(missing_ok=True)


def _digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path, own: bool = True) -> str:
    """The SHA-256 of a file, in hexadecimal. `own`: the file must have the right owner and mode."""
    digest = hashlib.sha256()
    with _opened(path, MAX_BYTES, own) as (fd, size):
        while size > 0 and (block := os.read(fd, min(size, 1 << 20))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path, max_bytes: int, own: bool = True) -> Iterator[tuple[int, int]]:
    """Descriptor and size of the regular file at `path`. Opening a FIFO or a device here neither blocks nor reads."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise _Untrusted(MISSING) from None
    except OSError as error:
        raise _Untrusted(_fault_of_kind(_mode(path)) or f"cannot be read ({error.strerror})") from None
    try:
        info = os.fstat(fd)
        if fault := _fault_of_kind(info.st_mode) or (_fault_of_owner(info) if own else None):
            raise _Untrusted(fault)
        if info.st_size > max_bytes:
            raise _Untrusted(f"has {info.st_size} bytes, more than any file of the cache")
        yield fd, info.st_size
    except OSError as error:
        raise _Untrusted(f"cannot be read ({error.strerror})") from None
    finally:
        os.close(fd)


def _mode(path: Path) -> int:
    """The mode of the file at `path`; 0 if there is no file."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _fault_of_kind(mode: int) -> str | None:
    kind = kind_of(mode) if mode else None
    return f"is {kind}" if kind else None


def _fault_of_owner(info: os.stat_result) -> str | None:
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {info.st_uid}, not to you (user {os.geteuid()})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file. Anything else of that name is removed first."""
    with suppress(FileNotFoundError):
        if kind_of(mode := path.lstat().st_mode):
            shutil.rmtree(path) if stat.S_ISDIR(mode) else path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _settle(path: Path) -> None:
    """Take write permission from others, and wait until the file is on the disk."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o755)
    _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in (*NO_SPACE, errno.EIO):
            raise
    finally:
        os.close(fd)
