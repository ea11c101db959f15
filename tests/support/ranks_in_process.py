"""Runs all ranks of a program as threads of one process (csrc/tools/run_ranks.cpp), under a sanitizer."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from support.tiny_config import tiny_config

from distmk.backends.build_cache import csrc_dir
from distmk.backends.host.build import FLAGS, build_emulator, build_sources, host_sources
from distmk.errors import BuildError
from distmk.graph.graph import Graph
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import Program, compile_graph

IN_ONE = Path(__file__).with_name("sources_in_one.cpp")
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
GUESSES = Path(__file__).with_name("tsan_suppressions.txt")
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=0 exitcode=66 report_signal_unsafe=0 suppressions={GUESSES} print_suppressions=0",
    "ASAN_OPTIONS": "exitcode=67",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
REPORT = ("ThreadSanitizer", "AddressSanitizer", "LeakSanitizer", "runtime error")


def build_in_one(name: str, flags: Sequence[str], sources: Sequence[Path]) -> Path:
    """`sources` linked as a program. But for task bodies they are one translation unit, which takes half as long to compile."""
    bodies = [path for path in sources if path.parent.name == "bodies"]
    others = [path for path in sources if path not in bodies]
    generated = {"sources.h": "".join(f'#include "{path}"\n' for path in others)}
    return build_sources(name, "", flags, [*bodies, IN_ONE], others, generated)


@contextlib.contextmanager
def skips_without(sanitizer: str) -> Iterator[None]:
    """Around a build: skips the test where the compiler does not have the sanitizer."""
    try:
        yield
    except BuildError as error:
        if "san" in str(error):
            pytest.skip(f"no -fsanitize={sanitizer} here: {error}")
        raise


@functools.cache
def tool(sanitizer: str, *defines: str, emulated: bool = False) -> Path:
    """run_ranks built with a sanitizer; skips the test where the compiler does not have it."""
    flags = [*SANITIZERS[sanitizer], "-g1", "-O1", "-fno-omit-frame-pointer", "-DDISTMK_PLANTED_BUG", *defines]
    with skips_without(sanitizer):
        if emulated:
            return build_emulator(flags, tool="run_ranks")
        return build_in_one("run_ranks", [*FLAGS, *flags], [*host_sources(), csrc_dir() / "tools" / "run_ranks.cpp"])


@functools.cache
def prefix() -> tuple[str, ...]:
    """Command prefix that turns off address randomisation, which can put a mapping where ThreadSanitizer's shadow belongs."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    command = (setarch, platform.machine(), "-R")
    return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else ()


def run_ranks(
    binary: Path, program: Program, folder: Path, *options: str, iterations: int = 30, first_only: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `program`; stdout holds standard output and standard error. `first_only`: the first race ends the run, for speed."""
    paths = []
    for rank, part in enumerate(program.ranks):
        paths.append(folder / f"rank{rank}.bin")
        paths[-1].write_bytes(part.to_bytes())
    env = os.environ | OPTIONS
    if first_only:
        env["TSAN_OPTIONS"] += " halt_on_error=1"
    argv = [*prefix(), str(binary), *options, str(iterations), *map(str, paths)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    if "unexpected memory mapping" in done.stdout or "Shadow memory range interleaves" in done.stdout:
        pytest.skip("the sanitizer cannot place its shadow memory here")
    return done


def assert_clean(done: subprocess.CompletedProcess[str], num_ranks: int) -> None:
    assert done.returncode == 0 and not any(word in done.stdout for word in REPORT), done.stdout[:6000]
    assert done.stdout.count("abort 0") == num_ranks, done.stdout


def tiny_decode(
    num_ranks: int,
    num_workers: int,
    attention_launch: Literal["massive", "spread"] = "massive",
    host_sizes: tuple[int, ...] = (),
) -> Graph:
    """A decode step of a Llama of two layers, with attention splits of at least 4 positions, and few pages of the KV cache."""
    options = DecodeOptions(
        num_ranks,
        num_workers,
        max_seqs=4,
        max_model_len=64,
        page_size=4,
        num_pages=16,
        max_kv_splits=4,
        min_kv_split_len=4,
        attention_launch=attention_launch,
        host_sizes=host_sizes,
    )
    return lower_programs(build_model(tiny_config()), options)[0]


def compiled(graph: Graph) -> Program:
    return compile_graph(graph)
