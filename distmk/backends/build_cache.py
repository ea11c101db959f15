"""A cache of compiled files, keyed by the content that they are made from. Ranks that start together compile only once."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from distmk import env
from distmk.backends.cache_files import (
    MISSING,
    NO_DIGEST,
    CacheError,
    cannot_write,
    fault_of,
    is_full,
    locked,
    own_folder,
    publish,
    require_trusted,
    tells_of_no_space,
)
from distmk.console import tell
from distmk.errors import BuildError
from distmk.nvtx_ranges import nvtx_range
from distmk.progress import progress

T = TypeVar("T")


def csrc_dir() -> Path:
    """The C++ sources: beside the package in a checkout, inside it in an installed wheel."""
    for path in (Path(__file__).parents[2] / "csrc", Path(__file__).parents[1] / "_csrc"):
        if (path / "abi.h").exists():
            return path
    raise BuildError("the C++ sources (csrc) are not installed with this package; reinstall distmk")


def cached(name: str, suffix: str, key: str, make: Callable[[Path], Path], what: str = "", usually: str = "") -> Path:
    """The file `<name>-<key><suffix>` of the cache. If it is missing or damaged, `make(scratch folder)` makes it.

    `what` is compiled, and how long that takes `usually`, for the progress line (default: `name`).

    BuildError: the cache folder cannot be written or trusted. BuildErrors of `make` pass through.
    """
    return published(f"{name}-{key}{suffix}", lambda path: path, make, f"compiling {what or name}", usually)


def content_key(ingredients: Iterable[str], sources: Iterable[Path]) -> str:
    """24 hex digits: a hash of `ingredients` (tools, flags) and of the names and contents of `sources`.

    Absolute paths are not part of the key, so a cache can be moved.
    """
    root = csrc_dir()
    named = {path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name: path for path in sources}
    digest = hashlib.sha256(repr(list(ingredients)).encode())
    for name in sorted(named):
        content = named[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:24]


def published(
    file_name: str, read: Callable[[Path], T | None], make: Callable[[Path], Path], doing: str, usually: str = ""
) -> T:
    """The value that `read` returns for a file of the cache. If there is none, `make(scratch folder)` makes the file.

    A file is made anew if it may not be loaded (`cache_files`), or if `read` returns None for it. If several processes
    ask at once, one makes the file and the others wait, with `doing` in their progress line.

    CacheError: the cache folder cannot be written, or its disk is full. BuildError: the folder cannot be trusted, or a
    file cannot be read back.
    """
    folder = env.cache_dir()
    target = folder / file_name
    require_trusted(folder)
    value, _ = _find(target, read)
    if value is not None:
        tell(f"{target} is taken from the cache", "debug")
        return value
    own_folder(folder)
    try:
        with progress(doing, usually=usually), locked(folder / f"{file_name}.lock"):
            value, fault = _find(target, read)
            if value is None:
                if fault not in (MISSING, NO_DIGEST):
                    tell(f"{target} {fault}; making it anew", "warning")
                with nvtx_range(doing):
                    _make(target, make)
                value, fault = _find(target, read)
    except OSError as error:
        raise cannot_write(folder, error) from None
    if value is None:
        raise BuildError(f"{target} cannot be read back: it {fault}; set DISTMK_CACHE to a folder on another disk")
    return value


def compiler_env(scratch: Path) -> dict[str, str]:
    """The environment for a compiler: messages in English, temporary files in `scratch`."""
    return os.environ | {"LC_ALL": "C", "TMPDIR": str(scratch)}


def _find(target: Path, read: Callable[[Path], T | None]) -> tuple[T | None, str]:
    """The value that `read` returns for the file, or None, and the fault to report if it is None."""
    if fault := fault_of(target):
        return None, fault
    return read(target), "is damaged"


def _make(target: Path, make: Callable[[Path], Path]) -> None:
    """Make the file in a scratch folder beside it, and publish it."""
    folder = target.parent
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        try:
            publish(make(Path(scratch)), target)
        except CacheError:
            raise
        except BuildError as error:
            # Not every compiler says that the disk is full; a linker may crash.
            if tells_of_no_space(str(error)) or is_full(Path(scratch)):
                raise cannot_write(folder, OSError(errno.ENOSPC, "")) from None
            raise
