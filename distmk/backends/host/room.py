"""The memory that this host has left for its ranks. Ranks that do not fit are refused.

Without this check, a rank that takes too much memory is killed silently, by the kernel or by the limit of its cgroup.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from distmk.backends.host.segments import FOLDER, no_room, unusable
from distmk.errors import UsageError

WEIGHTS = "weights"
MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# Folder, limit and use in bytes for cgroups of versions 1 and 2 (docs.kernel.org, admin-guide/cgroup-v1/memory and
# cgroup-v2).
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("", "memory.max", "memory.current")


def check_room(private: Mapping[str, int], heap_bytes: int, num_ranks: int) -> None:
    """UsageError unless this host has room for `num_ranks` ranks. Allocates nothing.

    private: bytes of private memory that each rank needs, by use. heap_bytes: each rank's bytes in the symmetric heap.
    """
    parts = {**private, "heap": heap_bytes}
    needed, available = num_ranks * sum(parts.values()), available_memory()
    if needed > available:
        listed = ", ".join(f"{name} {_gb(num_ranks * size)}" for name, size in parts.items())
        shorter = "lower --max-model-len, " if num_ranks * private.get(WEIGHTS, 0) < available else ""
        raise UsageError(
            f"{_count(num_ranks)} on this host would need {_gb(needed)} of memory ({listed}), but {_gb(available)} are "
            f"available; {shorter}use more hosts, or a smaller model"
        )
    if num_ranks * heap_bytes > free_shared_memory():
        raise no_room(num_ranks * heap_bytes, num_ranks)


def available_memory() -> int:
    """Bytes that processes here may still take without swapping: the kernel's estimate, or what the tightest cgroup has
    left.
    """
    return min([_mem_available(), *_left_in_cgroups()])


def free_shared_memory() -> int:
    """Bytes free in the folder of shared memory. UsageError: there is no such folder."""
    try:
        status = os.statvfs(FOLDER)
    except OSError as error:
        raise unusable(error) from None
    return status.f_bavail * status.f_frsize


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _count(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def _mem_available() -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups() -> Iterator[int]:
    """For each cgroup around this process that has a limit, the memory that it has left."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else ():
        controllers, path = line.split(":", 2)[1:]
        if not controllers or "memory" in controllers.split(","):
            mount, limit, used = _V1 if controllers else _V2
            own = CGROUPS / mount / path.lstrip("/")
            # In a container, the path may be the host's, and the top folder the container's own.
            for folder in (own, *own.parents):
                if folder.is_relative_to(CGROUPS / mount):
                    with contextlib.suppress(OSError, ValueError):  # no such folder, or "max"
                        most = int((folder / limit).read_text())
                        yield max(0, most - int((folder / used).read_text()) + _file_cache(folder))


def _file_cache(folder: Path) -> int:
    """Bytes in a cgroup's use that the kernel frees when they are needed."""
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))
