"""The symmetric heap of the host twin: one shared-memory segment for each rank, mapped by all ranks of the host.

Which ranks share a host is found by opening each other's segments. Names, process ids and user ids say nothing about it, as
those of two hosts may be equal. A segment that cannot be opened is that of a *far* rank.

A segment has a name only while the ranks open each other's. Its owner holds a lock on it for life. The operating system drops
the lock when the process dies in any way: so peers notice, and so a later run tells a leftover from a segment in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from pathlib import Path
from types import TracebackType

from distmk import env
from distmk.abi import Control
from distmk.bootstrap import Bootstrap, agree, agree_same
from distmk.bootstrap.messages import gather_json, malformed
from distmk.errors import UsageError

FOLDER = Path("/dev/shm")
LEAVE_POLL_S = 0.001
PROBE_BYTES = 4096
MODE = 0o600  # of a segment
# Of a segment that something else may have made: a link is not followed, a pipe is not waited for.
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def remove_leftovers(folder: Path = FOLDER) -> int:
    """Unlink segments of this user whose owner died before it had unlinked them; returns how many."""
    removed = 0
    for path in folder.glob(f"distmk-{os.getuid()}-*"):
        try:
            fd = os.open(path, OPEN_FLAGS)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_own(os.fstat(fd)):
                path.unlink(missing_ok=True)
                removed += 1
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
    return removed


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def open_segment(path: Path, num_bytes: int) -> int:
    """Open the segment of another rank. FileNotFoundError: there is none. UsageError: it is not what a rank makes."""
    refusal = f"{path} is no shared memory of this job: expected a file of {num_bytes} bytes, owned and read by this user alone"
    try:
        fd = os.open(path, OPEN_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{refusal} ({error.strerror})") from None
    status = os.fstat(fd)
    if not _is_own(status) or stat.S_IMODE(status.st_mode) != MODE or status.st_size != num_bytes:
        os.close(fd)
        raise UsageError(refusal)
    return fd


def _name(fd: int, path: Path) -> None:
    """Link an unnamed file of FOLDER to `path`."""
    folder = os.open(FOLDER, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With src_dir_fd, although both paths are absolute, Python calls linkat, which follows the link under /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def find_hosts(bootstrap: Bootstrap) -> tuple[int, ...]:
    """The numbers of ranks of the hosts, in rank order: groups of consecutive ranks that share memory. Collective.

    They sum to the number of ranks. It is one group if the ranks of some host are not consecutive. Within a host,
    DISTMK_VIRTUAL_NODE_SIZE and DISTMK_FAULT_DELAY_PUTS make groups of so many ranks. UsageError on every rank: as
    `SharedHeap`.
    """
    with SharedHeap(bootstrap, PROBE_BYTES, agree(bootstrap, _virtual_node_size)) as heap:
        return host_sizes(heap.reach)


def _virtual_node_size() -> int | None:
    delayed = env.delay_puts()
    return env.virtual_node_size() or (delayed[1] if delayed else None)


def host_sizes(reach: list[list[int]]) -> tuple[int, ...]:
    """The sizes of the groups in `reach` (by rank, the ranks of its group), or all in one if they are not consecutive."""
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
    """This rank's heap and its peers', each `num_bytes` long. `bases[r]`: the address of rank r's heap in this process, or 0
    if rank r is far.

    `node_size`: the ranks of a virtual node (None: real hosts); ranks of other nodes are far. `reach[r]`: the ranks that share
    memory with rank r, itself included. Collective. UsageError on every rank: no room in shared memory, a segment that is not
    what its owner made, or ranks that do not agree on which of them share memory.
    """

    def __init__(self, bootstrap: Bootstrap, num_bytes: int, node_size: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.rank = bootstrap.rank
        self._bootstrap = bootstrap
        self._maps: dict[int, mmap.mmap] = {}
        self._fds: dict[int, int] = {}
        self._close_fds = weakref.finalize(self, _close_all, self._fds)  # also of a heap that is dropped
        self._owner_pid = os.getpid()
        agree_same(bootstrap, "virtual nodes", {"DISTMK_VIRTUAL_NODE_SIZE": str(node_size or "not set")})
        node_size = node_size or bootstrap.world_size
        near = [rank for rank in range(bootstrap.world_size) if rank // node_size == self.rank // node_size]
        job = bootstrap.broadcast(secrets.token_hex(16).encode() if bootstrap.rank == 0 else None)
        if not re.fullmatch(b"[0-9a-f]{32}", job):
            raise malformed("rank 0", "name of the shared memory")
        own = _path_of(job.decode(), self.rank)
        try:
            self._fds[self.rank] = agree(bootstrap, lambda: self._create(own))
            agree(bootstrap, lambda: self._open_peers(job.decode(), near))
            self.reach = _exchange_reach(bootstrap, sorted(self._fds))
            agree(bootstrap, self._map_all)
        except BaseException:
            self._release()
            raise
        finally:
            own.unlink(missing_ok=True)
        self.bases = [self._base_of(rank) for rank in range(bootstrap.world_size)]

    def __enter__(self) -> SharedHeap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def far_ranks(self) -> list[int]:
        """Ranks that share no memory with this one. If some rank has any, all ranks have."""
        return [rank for rank, base in enumerate(self.bases) if not base]

    def _create(self, path: Path) -> int:
        remove_leftovers()
        try:
            # Locked before it has a name, so that no other process can take it for a leftover.
            fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
            os.fchmod(fd, MODE)  # whatever the umask is
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, self.num_bytes)
            _name(fd, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise UsageError(f"cannot make shared memory in {FOLDER}: {error.strerror}") from None
            free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
            raise UsageError(
                f"{FOLDER} has {free >> 20} MiB free, a rank's heap needs {self.num_bytes >> 20} MiB; "
                "make room or use fewer ranks"
            ) from None
        return fd

    def _open_peers(self, job: str, near: list[int]) -> None:
        for rank in near:
            if rank != self.rank:
                with contextlib.suppress(FileNotFoundError):  # far
                    self._fds[rank] = open_segment(_path_of(job, rank), self.num_bytes)

    def _map_all(self) -> None:
        for rank, fd in self._fds.items():
            self._maps[rank] = mmap.mmap(fd, self.num_bytes)

    def _base_of(self, rank: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._maps[rank])) if rank in self._maps else 0

    def clear(self, num_bytes: int) -> None:
        """Zero the first `num_bytes` of this rank's heap."""
        ctypes.memset(self.bases[self.rank], 0, num_bytes)

    def lost_ranks(self) -> list[int]:
        """Ranks whose process or host is gone; if there are none, ranks that left in order."""
        lost, left = self._gone()
        far = [rank for rank in self._bootstrap.lost_ranks() if not self.bases[rank]] if self.far_ranks else []
        return sorted(lost + far) or left

    def leave_together(self, timeout_s: float) -> bool:
        """Announce that this rank leaves, and wait until all ranks do that share memory with it.

        False: one of them died, or did not leave in `timeout_s`.
        """
        Control.from_address(self.bases[self.rank]).left = 1
        until = time.monotonic() + timeout_s
        while not all(Control.from_address(base).left for base in self.bases if base):
            if self._gone()[0] or time.monotonic() > until:
                return False
            time.sleep(LEAVE_POLL_S)
        return True

    def _gone(self) -> tuple[list[int], list[int]]:
        """Ranks that share memory with this one and whose process is gone: those that died, and those that left in order."""
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
        """Unmap all heaps; addresses and arrays in them must no longer be used. A forked child leaves its parent's alone."""
        if self._maps and os.getpid() == self._owner_pid:
            Control.from_address(self.bases[self.rank]).left = 1
        self.bases = [0] * len(self.bases)
        self._release()

    def _release(self) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # an array still refers to it; unmapped when the process ends
                mapped.close()
        self._maps = {}
        self._close_fds()


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds.values():
        os.close(fd)
    fds.clear()


def _path_of(job: str, rank: int) -> Path:
    return FOLDER / f"distmk-{os.getuid()}-{job}-{rank}"


def _exchange_reach(bootstrap: Bootstrap, mine: list[int]) -> list[list[int]]:
    """By rank, the ranks that it can open; UsageError on every rank unless they agree."""
    reach: list[list[int]] = gather_json(bootstrap, mine, "list of ranks with which it shares memory", [int])
    for rank, ranks in enumerate(reach):
        if not {rank} <= set(ranks) <= set(range(bootstrap.world_size)):
            raise malformed(f"rank {rank}", "list of ranks with which it shares memory")
    check_reach(reach)
    return reach
