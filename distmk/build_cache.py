"""A cache of compiled things, keyed by what they are made from; ranks that start together compile once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distmk import env
from distmk.errors import BuildError

T = TypeVar("T")


def csrc_dir() -> Path:
    """The C++ sources: beside the package in a checkout, inside it in an installed wheel."""
    for path in (Path(__file__).parents[1] / "csrc", Path(__file__).parent / "_csrc"):
        if (path / "abi.h").exists():
            return path
    raise BuildError("the C++ sources (csrc) are not installed with this package; reinstall distmk")


def cached(
    name: str, suffix: str, ingredients: Sequence[str], sources: Sequence[Path], make: Callable[[Path], Path]
) -> Path:
    """The file made by `make(scratch folder)` from `sources`, all headers of csrc and `ingredients` (tools, flags).

    Made once and published by one rename, so that a reader never sees half of it. BuildError: unwritable cache folder,
    or whatever `make` raises.
    """
    folder = _writable(env.cache_dir())
    target = folder / f"{name}-{_key(ingredients, sources)}{suffix}"
    if not target.exists():
        with _locked(folder / f"{target.name}.lock"):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    os.replace(make(Path(scratch)), target)
    return target


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "set DISTMK_CACHE to one you own"
        raise BuildError(f"cannot write to the cache folder {folder} ({reason}); {advice}") from None


def _key(ingredients: Sequence[str], sources: Sequence[Path]) -> str:
    """Hash of contents, never of where they lie, so that a cache can be moved."""
    root = csrc_dir()
    digest = hashlib.sha256(repr(list(ingredients)).encode())
    for path in sorted({*root.rglob("*.h"), *sources}):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def published(file_name: str, read: Callable[[Path], T | None], make: Callable[[Path], Path]) -> T:
    """What `read` finds in a file of the cache, which is made by `make(scratch folder)` if it finds nothing (None).

    Made by one of the processes that ask for it at once, and published by one rename. BuildError: unwritable cache folder,
    or a file that cannot be read back; OSError: a full disk.
    """
    target = env.cache_dir() / file_name
    found = read(target)
    if found is None:
        folder = _writable(target.parent)
        with _locked(folder / f"{file_name}.lock"):
            found = read(target)
            if found is None:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    os.replace(make(Path(scratch)), target)
                found = read(target)
    if found is None:
        raise BuildError(f"{target} cannot be read back; set DISTMK_CACHE to a folder on another disk")
    return found
