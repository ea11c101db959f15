"""Ways in which a file of the cache can be wrong, for tests of what loads it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

STRANGER = 65534  # a user id that no test runs as


def ways(rng: random.Random) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """A name and a function that does it to the file at a path, for each of about 40 ways."""
    for number in range(10):
        yield f"truncated {number}", lambda path: os.truncate(path, rng.randrange(path.stat().st_size))
    for number in range(10):
        yield f"one byte {number}", lambda path: _flip(path, rng)
    for number in range(4):
        yield f"page of zeros {number}", lambda path: _overwrite(path, rng, bytes(4096))
    yield "zeros", lambda path: path.write_bytes(bytes(path.stat().st_size))
    yield "empty", lambda path: path.write_bytes(b"")
    yield "longer", lambda path: path.write_bytes(path.read_bytes() + b"\0")
    yield "sparse", lambda path: os.truncate(path, 64 << 30)
    yield "text", lambda path: path.write_text("not a library\n")
    for kind, replacement in REPLACEMENTS.items():
        yield kind, lambda path, put=replacement: _replace(path, put)  # type: ignore[misc]
        yield f"{kind} as digest", lambda path, put=replacement: _replace(_digest(path), put)  # type: ignore[misc]
        yield f"{kind} as lock", lambda path, put=replacement: _both(path, put)  # type: ignore[misc]
    yield "digest of another file", lambda path: _digest(path).write_text("0" * 64 + "  other\n") and None
    yield "digest in no encoding", lambda path: _digest(path).write_bytes(b"\xff" * 64) and None
    yield "no digest", lambda path: _digest(path).unlink()
    yield "writable by all", lambda path: path.chmod(0o777)
    if os.geteuid() == 0:
        yield "a stranger's", lambda path: os.chown(path, STRANGER, STRANGER)
        yield "a stranger's digest", lambda path: os.chown(_digest(path), STRANGER, STRANGER)
        yield "device", lambda path: _replace(path, lambda at: os.mknod(at, stat.S_IFCHR | 0o600, os.makedev(1, 5)))


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": _folder,
    "socket": _socket,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/proc/nothing"),
}


def _digest(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _replace(path: Path, put: Callable[[Path], None]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    put(path)


def _both(path: Path, put: Callable[[Path], None]) -> None:
    """A lock matters only where the file must be made."""
    path.unlink()
    _replace(path.with_name(f"{path.name}.lock"), put)


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _overwrite(path: Path, rng: random.Random, block: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(rng.randrange(max(1, path.stat().st_size - len(block))))
        file.write(block)
