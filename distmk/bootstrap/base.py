"""The interface that every way of starting ranks offers to the rest of distmk."""

from __future__ import annotations

import abc
import math
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from distmk.errors import RankLostError, UsageError

LaunchKind = Literal["single", "local", "mpi", "torch", "slurm"]

TIMEOUT_ENV = "DISTMK_BOOTSTRAP_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0


class Bootstrap(abc.ABC):
    """A connected group of ranks that can exchange bytes.

    All calls but `abort` belong to one thread at a time, and collective calls must come in the same order on every
    rank. Once a rank is found lost, every later exchange raises the same RankLostError at once. A `with` block closes
    the group.
    """

    kind: LaunchKind
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    hostnames: list[str]
    timeout_s: float

    def __init__(self, kind: LaunchKind, rank: int, world_size: int, timeout_s: float) -> None:
        self.kind = kind
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.local_rank = rank
        self.local_size = world_size
        self.hostnames = []
        self._lost: RankLostError | None = None
        self._closed = False

    @abc.abstractmethod
    def allgather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank. Raises RankLostError if a rank is gone or silent for `timeout_s`."""

    @abc.abstractmethod
    def broadcast(self, payload: bytes | None = None) -> bytes:
        """Return rank 0's payload (the argument is ignored elsewhere). Raises RankLostError as `allgather` does."""

    def barrier(self) -> None:
        """Return once every rank has called this. Raises RankLostError as `allgather` does."""
        self.allgather(b"")

    @abc.abstractmethod
    def send_command(self, payload: bytes) -> None:
        """Rank 0: hand a command to every other rank. Raises RankLostError if one cannot take it."""

    @abc.abstractmethod
    def next_command(self) -> bytes | None:
        """Other ranks: wait, however long, for rank 0's next command; None once rank 0 closed.

        Raises RankLostError when rank 0 dies or reports another rank lost.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group and free what it holds; bounded in time, may be called again."""

    @abc.abstractmethod
    def abort(self, exit_code: int) -> None:
        """End the job now, without agreement: the other ranks are killed or meet RankLostError.

        Under MPI this ends the calling process as well (MPI_Abort with `exit_code`); elsewhere it returns.
        """

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._lost is not None:
            # A fresh object: raising the remembered one again would grow its traceback.
            raise type(self._lost)(str(self._lost))
        if self._closed:
            raise RuntimeError("this bootstrap is closed")

    def _check_is_hub(self, is_hub: bool, call: str) -> None:
        if is_hub != (self.rank == 0):
            raise RuntimeError(
                f"{call} is for {'rank 0' if is_hub else 'the ranks other than 0'}, not rank {self.rank}"
            )


def read_timeout_s(env: Mapping[str, str]) -> float:
    """The bound on blocking calls, from DISTMK_BOOTSTRAP_TIMEOUT_S in `env`. Raises UsageError if it is not one."""
    text = env.get(TIMEOUT_ENV)
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"{TIMEOUT_ENV} must be a positive number of seconds, got {text!r}")
    return timeout_s


def pack(parts: Sequence[bytes]) -> bytes:
    """Join byte strings so that `unpack` can part them again."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Undo `pack`."""
    parts = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return parts


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 1, 2`, for messages."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
