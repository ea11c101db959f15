"""The symmetric heap of the host twin: one shared-memory segment for each rank, mapped by all ranks of the host.

Ranks find out which of them share a host by opening each other's segments. Names, process ids and user ids prove
nothing, because two hosts may have equal ones. If a rank's segment cannot be opened, the rank is *far*.

A segment's owner holds a lock on it as long as it lives. The operating system drops the lock when the process dies in
any way, so peers notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import time
import weakref
from pathlib import Path
from types import TracebackType

from distmk import env
from distmk.abi import Control
from distmk.backends.host.segments import FOLDER, make_segment, open_segment, remove_leftovers, segment_path
from distmk.bootstrap import Bootstrap, agree, agree_same
from distmk.bootstrap.messages import gather_json, malformed
from distmk.errors import UsageError

LEAVE_POLL_S = 0.001
PROBE_BYTES = 4096


def find_hosts(bootstrap: Bootstrap) -> tuple[int, ...]:
    """The number of ranks of each host, in rank order.

    A host is a group of consecutive ranks that share memory. Collective.

    The numbers sum to the number of ranks. If the ranks of some host are not consecutive, there is one group. Within a
    host, DISTMK_VIRTUAL_NODE_SIZE and DISTMK_FAULT_DELAY_PUTS make groups of a given size. UsageError on every rank: as
    for `SharedHeap`.
    """
    with SharedHeap(bootstrap, PROBE_BYTES, agree(bootstrap, _virtual_node_size)) as heap:
        return host_sizes(heap.reach)


def _virtual_node_size() -> int | None:
    delayed = env.delay_puts()
    return env.virtual_node_size() or (delayed[1] if delayed else None)


def host_sizes(reach: list[list[int]]) -> tuple[int, ...]:
    """The sizes of the groups in `reach` (by rank, the ranks of its group).

    If they are not consecutive, one group has all ranks.
    """
    groups = sorted({tuple(group) for group in reach})
    if any(group[-1] - group[0] >= len(group) for group in groups):
        return (len(reach),)
    return tuple(len(group) for group in groups)


def check_reach(reach: list[list[int]]) -> None:
    """UsageError unless `reach` (by rank, the ranks whose memory it shares, itself included) divides the ranks into groups."""
    for rank, shared in enumerate(reach):
        for other in shared:
            if reach[other] != shared:
                odd = min(set(shared) ^ set(reach[other]))
                near, far = (rank, other) if odd in shared else (other, rank)
                raise UsageError(
                    f"rank {near} shares memory with rank {odd}, but rank {far}, which shares memory with rank {near}, does "
                    f"not; give all ranks of a host the same {FOLDER} and the same user"
                )


class SharedHeap:
    """This rank's heap and its peers' heaps, each `num_bytes` long.

    bases: by rank, the address of its heap in this process; 0 if the rank is far.
    node_size: the number of ranks of a virtual node (None: real hosts); ranks of other nodes are far.
    reach: by rank, the ranks that share memory with it, itself included.

    Construction is collective. UsageError on every rank: no room in shared memory, a segment that is not as its owner
    made it, or ranks that do not agree on which of them share memory.
    """

    def __init__(self, bootstrap: Bootstrap, num_bytes: int, node_size: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.rank = bootstrap.rank
        self._bootstrap = bootstrap
        self._maps: dict[int, mmap.mmap] = {}
        self._fds: dict[int, int] = {}
        self._close_fds = weakref.finalize(self, _close_all, self._fds)  # also closes those of a heap that is dropped
        self._owner_pid = os.getpid()
        agree_same(bootstrap, "virtual nodes", {"DISTMK_VIRTUAL_NODE_SIZE": str(node_size or "not set")})
        node_size = node_size or bootstrap.world_size
        near = [rank for rank in range(bootstrap.world_size) if rank // node_size == self.rank // node_size]
        job = bootstrap.broadcast(secrets.token_hex(16).encode() if bootstrap.rank == 0 else None)
        if not re.fullmatch(b"[0-9a-f]{32}", job):
            raise malformed("rank 0", "name of the shared memory")
        own = segment_path(job.decode(), self.rank)
        try:
            agree(bootstrap, lambda: self._create(own))
            agree(bootstrap, lambda: self._open_peers(job.decode(), near))
            self.reach = _exchange_reach(bootstrap, sorted(self._fds))
            agree(bootstrap, self._map_all)
        except BaseException:
            self._release()
            raise
        finally:
            with contextlib.suppress(OSError):  # it may not exist, and a missing folder has its own report
                own.unlink()
        self.bases = [self._base_of(rank) for rank in range(bootstrap.world_size)]

    def __enter__(self) -> SharedHeap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def far_ranks(self) -> list[int]:
        """Ranks that share no memory with this one. If one rank has far ranks, all ranks have some."""
        return [rank for rank, base in enumerate(self.bases) if not base]

    def _create(self, path: Path) -> None:
        remove_leftovers()
        self._fds[self.rank] = make_segment(path, self.num_bytes)

    def _open_peers(self, job: str, near: list[int]) -> None:
        for rank in near:
            if rank != self.rank:
                with contextlib.suppress(FileNotFoundError):  # far
                    self._fds[rank] = open_segment(segment_path(job, rank), self.num_bytes)

    def _map_all(self) -> None:
        try:
            for rank, fd in self._fds.items():
                self._maps[rank] = mmap.mmap(fd, self.num_bytes)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot map {len(self._fds)} x {self.num_bytes >> 20} MiB of shared memory ({error}); raise the limit of the "
                "address space (ulimit -v), or use fewer ranks on this host"
            ) from None

    def _base_of(self, rank: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._maps[rank])) if rank in self._maps else 0

    @property
    def own(self) -> mmap.mmap:
        """This rank's heap. Objects that use its memory, such as numpy arrays, keep it mapped even after `close`."""
        return self._maps[self.rank]

    def clear(self, num_bytes: int) -> None:
        """Zero the first `num_bytes` of this rank's heap."""
        ctypes.memset(self.bases[self.rank], 0, num_bytes)

    def lost_ranks(self) -> list[int]:
        """Ranks whose process or host is gone. If there are none, ranks that left in order."""
        lost, left = self._gone()
        far = [rank for rank in self._bootstrap.lost_ranks() if not self.bases[rank]] if self.far_ranks else []
        return sorted(lost + far) or left

    def leave_together(self, timeout_s: float) -> bool:
        """Announce that this rank leaves, and wait until all ranks that share memory with it leave.

        False: one of them died, or did not leave within `timeout_s`.
        """
        Control.from_address(self.bases[self.rank]).left = 1
        until = time.monotonic() + timeout_s
        while not all(Control.from_address(base).left for base in self.bases if base):
            if self._gone()[0] or time.monotonic() > until:
                return False
            time.sleep(LEAVE_POLL_S)
        return True

    def _gone(self) -> tuple[list[int], list[int]]:
        """Ranks that share memory with this one and have ended, in two lists: ranks that died, and ranks that left in order."""
        lost: list[int] = []
        left: list[int] = []
        for rank, fd in self._fds.items():
            if rank == self.rank:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_UN)
                (left if Control.from_address(self.bases[rank]).left else lost).append(rank)
            except OSError:
                pass
        return lost, left

    def close(self) -> None:
        """Unmap all heaps, except heaps that arrays still refer to. Addresses must no longer be used.

        A forked child leaves its parent's heaps alone.
        """
        if self._maps and os.getpid() == self._owner_pid:
            Control.from_address(self.bases[self.rank]).left = 1
        self.bases = [0] * len(self.bases)
        self._release()

    def _release(self) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # an array still refers to it; it is unmapped with the array
                mapped.close()
        self._maps = {}
        self._close_fds()


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds.values():
        os.close(fd)
    fds.clear()


def _exchange_reach(bootstrap: Bootstrap, mine: list[int]) -> list[list[int]]:
    """For each rank, the ranks whose segments it can open. UsageError on every rank unless they agree."""
    reach: list[list[int]] = gather_json(bootstrap, mine, "list of ranks with which it shares memory", [int])
    for rank, ranks in enumerate(reach):
        if not {rank} <= set(ranks) <= set(range(bootstrap.world_size)):
            raise malformed(f"rank {rank}", "list of ranks with which it shares memory")
    check_reach(reach)
    return reach
