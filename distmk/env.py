"""The environment variables of the runtime (those of the launchers are read by bootstrap). All are listed in README."""

from __future__ import annotations

import os
from pathlib import Path

from distmk.errors import UsageError


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number; unset it or give seconds") from None
    if not value > 0:
        raise UsageError(f"{name}={text} must be positive")
    return value


def _count(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()) or int(text) < min(default, 1):
        raise UsageError(f"{name}={text!r} is no number of ranks; unset it or give 1 or more")
    return int(text)


def cache_dir() -> Path:
    """DISTMK_CACHE: where compiled runtimes and programs are kept."""
    given = os.environ.get("DISTMK_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "distmk"


def cubin_dir() -> Path | None:
    """DISTMK_CUBIN_DIR: kernels that `distmk build --output` made, looked for here before anything is compiled."""
    given = os.environ.get("DISTMK_CUBIN_DIR")
    return Path(given) if given else None


def nvcc_flags() -> list[str]:
    """DISTMK_NVCC_FLAGS: more flags for the kernel, such as -DDISTMK_RACECHECK for compute-sanitizer."""
    return os.environ.get("DISTMK_NVCC_FLAGS", "").split()


def caches_programs() -> bool:
    """DISTMK_PROGRAM_CACHE=0: compile and prove at every start."""
    return os.environ.get("DISTMK_PROGRAM_CACHE") != "0"


def compiler() -> str:
    """DISTMK_CXX: the C++ compiler of the host runtime."""
    return os.environ.get("DISTMK_CXX") or os.environ.get("CXX") or "g++"


def nvshmem_home() -> Path | None:
    """NVSHMEM_HOME: headers and device library, where they are not the pip package's."""
    given = os.environ.get("NVSHMEM_HOME")
    return Path(given) if given else None


def deadline_s() -> float:
    """DISTMK_DEADLINE_S: how long a wait inside a launch may make no progress."""
    return _number("DISTMK_DEADLINE_S", 30.0)


def ranks_per_gpu() -> int:
    """DISTMK_RANKS_PER_GPU: how many ranks may share a GPU (1: each has its own)."""
    return _count("DISTMK_RANKS_PER_GPU", default=1)


def virtual_node_size() -> int | None:
    """DISTMK_VIRTUAL_NODE_SIZE: so many ranks reach one another by pointers, others as if on another host (None: as it is)."""
    return _count("DISTMK_VIRTUAL_NODE_SIZE", default=0) or None


def launch_iterations() -> int:
    """DISTMK_LAUNCH_ITERATIONS: end a launch after so many iterations and let another go on (0: run all in one)."""
    text = os.environ.get("DISTMK_LAUNCH_ITERATIONS") or "0"
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"DISTMK_LAUNCH_ITERATIONS={text!r} is no number of iterations; unset it or give 0 or more")
    return int(text)


def loopback() -> bool:
    """DISTMK_LOOPBACK=1: a rank by itself pushes and adds up, to itself, what several ranks add up."""
    return os.environ.get("DISTMK_LOOPBACK") == "1"


def emulator_seed() -> int | None:
    """DISTMK_EMULATOR_SEED: of 32 bits, decides which warps fall behind and when copies land (None: another each launch)."""
    text = os.environ.get("DISTMK_EMULATOR_SEED")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise UsageError(f"DISTMK_EMULATOR_SEED={text!r} is no seed; unset it or give a number from 0 to {2**32 - 1}")
    return int(text)


def drop_signal() -> tuple[int, int, int, int] | None:
    """DISTMK_FAULT_DROP_SIGNAL=from,to,event,nth: lose the nth trigger of an event (a fault)."""
    text = os.environ.get("DISTMK_FAULT_DROP_SIGNAL")
    if not text:
        return None
    try:
        source, target, event, nth = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"DISTMK_FAULT_DROP_SIGNAL={text!r}; expected from_rank,to_rank,event,nth") from None
    return source, target, event, nth


def delay_puts() -> tuple[int, int, int] | None:
    """DISTMK_FAULT_DELAY_PUTS=max_us,node_size,seed: puts between virtual nodes of `node_size` ranks take up to
    `max_us` and overtake each other (a fault; host twin only).
    """
    text = os.environ.get("DISTMK_FAULT_DELAY_PUTS")
    if not text:
        return None
    try:
        max_us, node_size, seed = (int(part) for part in text.split(","))
        if max_us < 1 or node_size < 1 or seed < 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"DISTMK_FAULT_DELAY_PUTS={text!r}; expected max_us,node_size,seed") from None
    return max_us, node_size, seed
