"""A cache of compiled programs that passed `check`.

A program follows from the model's config, the options and this package's code; its file is named by a hash of these.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from dataclasses import asdict
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import published
from distmk.backends.cache_files import CacheError, remove
from distmk.check import check_with_progress
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program import file as program_file
from distmk.program.program import Program, compile_graph
from distmk.progress import progress
from distmk.tasks.abi_header import abi_hash

PREFIX, SUFFIX = "program-", ".npz"
MAX_BYTES = 1 << 30  # of all programs in the cache


def proved_program(config: ModelConfig, options: DecodeOptions, rank: int) -> Program:
    """The decode program of `config`, for `rank`: from the cache, or else compiled, proved and added to the cache.

    If several ranks share a cache folder, one compiles and the others wait. UsageError: the model cannot be sharded over so
    many ranks; BuildError: a cache folder that cannot be trusted; CheckError: the compiler made a mistake.
    """
    if not env.caches_programs():
        return _prove(config, options)
    made: list[Program] = []

    def make(scratch: Path) -> Path:
        made.append(_prove(config, options))
        program_file.save(made[0], scratch / "program")
        return scratch / "program"

    try:
        name, doing = f"{PREFIX}{_key(config, options)}{SUFFIX}", "compiling and proving the program"
        program: Program = published(name, lambda path: _read(path, rank), make, doing)
        if made:
            _make_room(env.cache_dir())
        return program
    except CacheError:  # costs only time, at the next start
        return made[0] if made else _prove(config, options)


def _prove(config: ModelConfig, options: DecodeOptions) -> Program:
    with progress("compiling the program"):
        program = compile_graph(*lower_programs(build_model(config), options))
    check_with_progress(program)
    return program


def _read(path: Path, rank: int) -> Program | None:
    try:
        program = program_file.load(path, rank)
    except program_file.DamagedFile:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the cache removes the least recently used
    return program


def _key(config: ModelConfig, options: DecodeOptions) -> str:
    operators = repr(build_model(config).operators)  # of a class that may be outside of this package
    parts = [operators, repr(asdict(config)), repr(asdict(options)), str(abi_hash()), _code_hash()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _code_hash() -> str:
    """A hash of this package's Python files: any of them may influence a program or its proof."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _make_room(folder: Path) -> None:
    """Remove the least recently used programs, and their locks, until all take at most MAX_BYTES."""
    with contextlib.suppress(OSError):  # another process may be doing the same
        found = sorted((path.stat().st_mtime, path) for path in folder.glob(f"{PREFIX}*{SUFFIX}"))
        total = sum(path.stat().st_size for _, path in found)
        for _, path in found[:-1]:
            if total <= MAX_BYTES:
                break
            total -= path.stat().st_size
            remove(path)
