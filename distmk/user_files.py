"""The files that a user names. Only regular files are opened, and files that are read whole have a size limit.

A FIFO in place of a file would block its reader, and a device such as /dev/zero would fill the memory. A file that is
written takes its place only when it is complete.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from distmk.errors import ModelError, UsageError
from distmk.open_files import reason

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


def kind_of(mode: int) -> str | None:
    """The kind of file with this mode, such as "a FIFO"; None: a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def exists(path: Path, error: type[UsageError] = ModelError) -> bool:
    """Whether there is a file at `path`.

    `error`: this cannot be determined, for example in a folder that this user may not enter.
    """
    return _mode(path, error) is not None


def is_folder(path: Path, error: type[UsageError] = ModelError) -> bool:
    """Whether `path` is a folder. `error`: there is neither a folder nor a regular file, or this cannot be determined."""
    mode = _mode(path, error)
    if mode is None:
        raise error(f"{path}: no such file or folder")
    if not stat.S_ISDIR(mode):
        _check_regular(path, mode, error)
    return stat.S_ISDIR(mode)


def list_folder(folder: Path, suffix: str, error: type[UsageError] = ModelError) -> list[Path]:
    """The entries of `folder` whose names end in `suffix`, except folders, by name. `error`: it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name for entry in entries if entry.name.endswith(suffix) and not entry.is_dir()
            )
    except OSError as e:
        raise error(f"{folder}: cannot be listed: {reason(e)}") from None


def open_regular(path: Path, error: type[UsageError] = ModelError) -> int:
    """A descriptor for reading the regular file at `path`. `error`: it is not a regular file, or cannot be read."""
    mode = _mode(path, error)
    if mode is not None:
        _check_regular(path, mode, error)
    try:
        # Not blocking, because a FIFO may have taken the place of the file.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise error(f"{path}: cannot be read: {reason(e)}") from None
    try:
        _check_regular(path, os.fstat(fd).st_mode, error)
    except UsageError:
        os.close(fd)
        raise
    return fd


def read_whole(
    path: Path, max_bytes: int, error: type[UsageError] = ModelError, advice: str = "fetch it again"
) -> bytes:
    """The contents of the regular file at `path`. `error`: it is not one, cannot be read, or has more than `max_bytes`."""
    fd = open_regular(path, error)
    try:
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            data = b"" if size > max_bytes else file.read(max_bytes + 1)
    except OSError as e:
        raise error(f"{path}: cannot be read: {reason(e)}") from None
    if max(size, len(data)) > max_bytes:
        most = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
        raise error(
            f"{path}: has {max(size, len(data))} bytes; a file of this kind has at most {most}, "
            f"so it is something else; {advice}"
        )
    return data


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of the regular file at `path` when the block ends; that file need not exist.

    Until then, and if the block fails, the old file stays. A device or a pipe is written directly. OSError: it cannot
    be written.
    """
    mode = _mode_to_write(path)
    if mode is not None and not stat.S_ISREG(mode):
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO without a reader is an error
        os.set_blocking(fd, True)
        with open(fd, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    made = target.with_name(f".distmk-{secrets.token_hex(8)}")
    try:
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        if mode is not None:
            made.chmod(stat.S_IMODE(mode))
        made.replace(target)
    except BaseException:
        with suppress(OSError):
            made.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """OSError: as far as can be determined, `replacing` would not work for `path`. Leaves nothing behind."""
    mode = _mode_to_write(path)
    if mode is not None and not stat.S_ISREG(mode):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    made = Path(os.path.realpath(path)).with_name(f".distmk-{secrets.token_hex(8)}")
    os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    made.unlink()


def _mode_to_write(path: Path) -> int | None:
    """Type and permissions of the file that `path` leads to; None if there is none.

    OSError: it is a folder, or out of reach.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except ValueError:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "not a path") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return mode


def _mode(path: Path, error: type[UsageError]) -> int | None:
    """Type and permissions of the file that `path` leads to; None if there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise error(f"{path}: cannot be reached: {reason(e)}") from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise error(f"{str(path)!r} is not a path") from None


def _check_regular(path: Path, mode: int, error: type[UsageError]) -> None:
    if kind := kind_of(mode):
        raise error(f"{path}: is {kind}; a regular file was expected")
