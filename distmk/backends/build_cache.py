"""A cache of compiled files, keyed by the content they are made from; ranks that start together compile once."""

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
    """The file `<name>-<key><suffix>` of the cache, made by `make(scratch folder)` if it is not there as it was published.

    `what` it is, for the line that says what takes so long (default: its name), and how long that takes `usually`.

    BuildError: the cache folder cannot be written or trusted. Any BuildError of `make` passes through.
    """
    return published(f"{name}-{key}{suffix}", lambda path: path, make, f"compiling {what or name}", usually)


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


def published(
    file_name: str, read: Callable[[Path], T | None], make: Callable[[Path], Path], doing: str, usually: str = ""
) -> T:
    """The value that `read` returns for a file of the cache; while there is none, `make(scratch folder)` makes the file.

    A file that may not be loaded (`cache_files`), or for which `read` returns None, is made anew. Of several processes that
    ask at once, one makes the file and the others wait, which shows as `doing`. CacheError: the cache folder cannot be
    written, or its disk is full. BuildError: the folder cannot be trusted, or a file not be read back.
    """
    folder = env.cache_dir()
    target = folder / file_name
    require_trusted(folder)
    found, _ = _find(target, read)
    if found is not None:
        return found
    own_folder(folder)
    try:
        with progress(doing, usually=usually), locked(folder / f"{file_name}.lock"):
            found, fault = _find(target, read)
            if found is None:
                if fault not in (MISSING, NO_DIGEST):
                    tell(f"{target} {fault}; making it anew")
                with nvtx_range(doing):
                    _make(target, make)
                found, fault = _find(target, read)
    except OSError as error:
        raise cannot_write(folder, error) from None
    if found is None:
        raise BuildError(f"{target} cannot be read back: it {fault}; set DISTMK_CACHE to a folder on another disk")
    return found


def compiler_env(scratch: Path) -> dict[str, str]:
    """Environment of a compiler: its messages in English, and its temporary files in `scratch`."""
    return os.environ | {"LC_ALL": "C", "TMPDIR": str(scratch)}


def _find(target: Path, read: Callable[[Path], T | None]) -> tuple[T | None, str]:
    """What `read` returns for the file, or None and what is wrong with it."""
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
            # Not every compiler says that the disk is full; a linker may die of it.
            if tells_of_no_space(str(error)) or is_full(Path(scratch)):
                raise cannot_write(folder, OSError(errno.ENOSPC, "")) from None
            raise
