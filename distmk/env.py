"""The environment variables of the runtime; `bootstrap` reads the launchers' variables. launch/README.md lists all of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distmk.errors import UsageError, shown

MOST = (1 << 31) - 1  # largest number; C++ has 32 bits for it
MOST_SECONDS = 1_000_000  # longest time


def _seconds(name: str, default: float) -> float:
    """A positive number of seconds."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={shown(text)} is not a number; unset it or give seconds") from None
    if not 0 < value <= MOST_SECONDS:
        raise UsageError(f"{name}={shown(text)} must be positive, and at most {MOST_SECONDS}")
    return value


def _integer(name: str, default: int, least: int, kind: str, advice: str, most: int = MOST) -> int:
    """An integer from `least` to `most`. UsageError: "NAME='text' is no <kind>; unset it or give <advice>"."""
    text = os.environ.get(name) or str(default)
    value = whole(text)
    if value is None or not least <= value <= most:
        raise UsageError(f"{name}={shown(text)} is no {kind}; unset it or give {advice}")
    return value


def whole(text: str) -> int | None:
    """The whole number that `text` writes in ASCII, with or without a sign; None: it is none, or longer than 20 characters."""
    return int(text) if re.fullmatch("[+-]?[0-9]+", text.strip(), re.ASCII) and len(text) <= 20 else None


def _integers(name: str, expected: str) -> list[int] | None:
    """Integers separated by commas, as many as `expected` names; None if the variable is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    numbers = [number for part in text.split(",") if (number := whole(part)) is not None and abs(number) <= MOST]
    if len(numbers) != len(expected.split(",")) or len(numbers) != len(text.split(",")):
        raise UsageError(f"{name}={shown(text)}; expected {expected}")
    return numbers


def _folder(name: str) -> Path | None:
    given = os.environ.get(name)
    return Path(given) if given else None


def cache_dir() -> Path:
    """DISTMK_CACHE: the folder for compiled runtimes and programs. UsageError: it is not set, and there is no home folder."""
    if given := _folder("DISTMK_CACHE"):
        return given
    try:
        return (_folder("XDG_CACHE_HOME") or Path.home() / ".cache") / "distmk"
    except RuntimeError:
        raise UsageError("this user has no home folder for a cache; set DISTMK_CACHE to a folder of your own") from None


def cubin_dir() -> Path | None:
    """DISTMK_CUBIN_DIR: a folder with kernels of `distmk build --output`, which are used instead of compiling."""
    return _folder("DISTMK_CUBIN_DIR")


def nvcc_flags() -> list[str]:
    """DISTMK_NVCC_FLAGS: additional flags for the kernel, such as -DDISTMK_RACECHECK for compute-sanitizer."""
    return os.environ.get("DISTMK_NVCC_FLAGS", "").split()


def caches_programs() -> bool:
    """Whether to cache programs. DISTMK_PROGRAM_CACHE=0: no, compile and prove at every start."""
    return os.environ.get("DISTMK_PROGRAM_CACHE") != "0"


def shows_progress() -> bool:
    """Whether to say on stderr which work takes long. DISTMK_PROGRESS=0: no."""
    return os.environ.get("DISTMK_PROGRESS") != "0"


LOG_LEVELS = ("error", "warning", "info", "debug")
"""Levels of the lines on stderr, the most urgent first."""


def log_level() -> str:
    """DISTMK_LOG: the last of LOG_LEVELS whose lines are written to stderr (default: info)."""
    level = os.environ.get("DISTMK_LOG") or "info"
    if level not in LOG_LEVELS:
        raise UsageError(f"DISTMK_LOG={shown(level)} is no level; unset it or give one of {', '.join(LOG_LEVELS)}")
    return level


def uses_amx() -> bool:
    """Whether the host twin multiplies with AMX if the processor has it. DISTMK_AMX=0: no."""
    return os.environ.get("DISTMK_AMX") != "0"


def compiler() -> str:
    """DISTMK_CXX: the C++ compiler of the host runtime."""
    return os.environ.get("DISTMK_CXX") or os.environ.get("CXX") or "g++"


def nvshmem_home() -> Path | None:
    """NVSHMEM_HOME: the folder of NVSHMEM's headers and device library, instead of the pip package's."""
    return _folder("NVSHMEM_HOME")


def api_key() -> str | None:
    """DISTMK_API_KEY: a key that clients of `distmk serve` must send, beside those of --api-key."""
    return os.environ.get("DISTMK_API_KEY") or None


def deadline_s() -> float:
    """DISTMK_DEADLINE_S: how many seconds a wait inside a launch may take without progress."""
    return _seconds("DISTMK_DEADLINE_S", 30.0)


def ranks_per_gpu() -> int:
    """DISTMK_RANKS_PER_GPU: how many ranks may share a GPU (1: each has its own)."""
    return _integer("DISTMK_RANKS_PER_GPU", 1, 1, "number of ranks", "1 or more")


def virtual_node_size() -> int | None:
    """DISTMK_VIRTUAL_NODE_SIZE: the number of ranks of a virtual node (None: real nodes).

    Ranks reach other virtual nodes as if they were on another host.
    """
    return _integer("DISTMK_VIRTUAL_NODE_SIZE", 0, 0, "number of ranks", "1 or more") or None


def launch_iterations() -> int:
    """DISTMK_LAUNCH_ITERATIONS: iterations after which a kernel ends and another one continues (0: all in one)."""
    return _integer("DISTMK_LAUNCH_ITERATIONS", 0, 0, "number of iterations", "0 or more")


def loopback() -> bool:
    """DISTMK_LOOPBACK=1: a single rank runs the all-reduces of several ranks, pushing to itself."""
    return os.environ.get("DISTMK_LOOPBACK") == "1"


def row_buckets() -> tuple[int, ...] | None:
    """DISTMK_ROW_BUCKETS=rows,rows,...: for each program, the most token rows of an iteration (None: not set)."""
    if not os.environ.get("DISTMK_ROW_BUCKETS"):
        return None
    try:
        return tuple(int(rows) for rows in os.environ["DISTMK_ROW_BUCKETS"].split(","))
    except ValueError:
        given = shown(os.environ["DISTMK_ROW_BUCKETS"])
        raise UsageError(f"DISTMK_ROW_BUCKETS={given}; expected numbers of rows, such as 16,512") from None


def emulator_seed() -> int | None:
    """DISTMK_EMULATOR_SEED: 32 bits that determine which warps fall behind and when copies land (None: random)."""
    if not os.environ.get("DISTMK_EMULATOR_SEED"):
        return None
    advice = f"a number from 0 to {2**32 - 1}"
    return _integer("DISTMK_EMULATOR_SEED", 0, 0, "seed", advice, most=2**32 - 1)


def drop_signal() -> tuple[int, int, int, int] | None:
    """DISTMK_FAULT_DROP_SIGNAL=from_rank,to_rank,event,nth: inject a fault, the loss of the nth trigger of an event."""
    numbers = _integers("DISTMK_FAULT_DROP_SIGNAL", "from_rank,to_rank,event,nth")
    if numbers is None:
        return None
    source, target, event, nth = numbers
    return source, target, event, nth


def delay_puts() -> tuple[int, int, int] | None:
    """DISTMK_FAULT_DELAY_PUTS=max_us,node_size,seed: inject a fault (host twin only).

    Puts between virtual nodes of `node_size` ranks take up to `max_us` microseconds and overtake each other.
    """
    expected = "max_us,node_size,seed"
    numbers = _integers("DISTMK_FAULT_DELAY_PUTS", expected)
    if numbers is None:
        return None
    max_us, node_size, seed = numbers
    if max_us < 1 or node_size < 1 or seed < 0:
        raise UsageError(f"DISTMK_FAULT_DELAY_PUTS={shown(os.environ['DISTMK_FAULT_DELAY_PUTS'])}; expected {expected}")
    return max_us, node_size, seed
