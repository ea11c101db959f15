"""A cache of compiled files, keyed by the content they are made from; ranks that start together compile once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distmk import env
from distmk.errors import BuildError

T = TypeVar("T")


def csrc_dir() -> Path:
    """The C++ sources: beside the package in a checkout, inside it in an installed wheel."""
    for path in (Path(__file__).parents[2] / "csrc", Path(__file__).parents[1] / "_csrc"):
        if (path / "abi.h").exists():
            return path
    raise BuildError("the C++ sources (csrc) are not installed with this package; reinstall distmk")


def cached(name: str, suffix: str, key: str, make: Callable[[Path], Path]) -> Path:
    """The file `<name>-<key><suffix>` of the cache, made by `make(scratch folder)` if it is not there.

    BuildError: unwritable cache folder. Any error of `make` passes through.
    """
    return published(f"{name}-{key}{suffix}", lambda path: path if path.exists() else None, make)


def content_key(ingredients: Iterable[str], sources: Iterable[Path]) -> str:
    """24 hex digits: a hash of `ingredients` (tools, flags) and of the names and contents of `sources`.

    Absolute paths do not count, so that a cache can be moved.
    """
    root = csrc_dir()
    named = {path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name: path for path in sources}
    digest = hashlib.sha256(repr(list(ingredients)).encode())
    for name in sorted(named):
        content = named[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:24]


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "set DISTMK_CACHE to one you own"
        raise BuildError(f"cannot write to the cache folder {folder} ({reason}); {advice}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def published(file_name: str, read: Callable[[Path], T | None], make: Callable[[Path], Path]) -> T:
    """The value that `read` returns for a file of the cache; while it returns None, `make(scratch folder)` makes the file.

    Of several processes that ask at once, one makes the file. It is published by one rename, so that no reader sees half of
    it; a report that `make` leaves beside it, with suffix .json, is published first. BuildError: unwritable cache folder, or
    a file that cannot be read back; OSError: a full disk.
    """
    target = env.cache_dir() / file_name
    found = read(target)
    if found is None:
        folder = _writable(target.parent)
        with _locked(folder / f"{file_name}.lock"):
            found = read(target)
            if found is None:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    made = make(Path(scratch))
                    report = made.with_suffix(".json")
                    if report.exists():
                        os.replace(report, target.with_suffix(".json"))
                    os.replace(made, target)
                found = read(target)
    if found is None:
        raise BuildError(f"{target} cannot be read back; set DISTMK_CACHE to a folder on another disk")
    return found
