"""The interface of a connected group of ranks, the same for every launcher."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from distmk.errors import RankLostError, UsageError, shown

LauncherKind = Literal["single", "local", "mpi", "torch", "slurm"]

TIMEOUT_ENV = "DISTMK_BOOTSTRAP_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
LINK_TIMEOUT_ENV = "DISTMK_LINK_TIMEOUT_S"
DEFAULT_LINK_TIMEOUT_S = 10.0
SILENCE_S = 10.0  # an idle rank that does not answer for so long counts as lost
MOST_SECONDS = 1e6  # the limit of the kernel's timers


@dataclass(frozen=True)
class Member:
    """A process as its launcher describes it; the local rank and size are None if the launcher does not give them."""

    kind: LauncherKind
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    several_hosts: bool = False  # the launcher says that the ranks are on several hosts

    @property
    def is_spread(self) -> bool:
        """Whether the ranks are on several hosts, as far as the launcher says."""
        return self.several_hosts or (self.local_size is not None and self.local_size < self.world_size)


class Launcher:
    """The part of a launcher in the connections between ranks. The defaults are for a launcher that adds nothing."""

    leaves_together = False  # whether `close` waits until every rank closes

    def check_joining(self) -> None:
        """Called every 0.25 s or more often while rank 0 waits for the others to join. May raise RankLostError."""

    def describe_exit(self, rank: int) -> str | None:
        """How the process of `rank` ended; None while it runs, or if the launcher does not know."""
        return None

    def describe_stop(self, rank: int) -> str | None:
        """A text if the process of `rank` is stopped, for example by SIGSTOP; else, or if the launcher does not know, None."""
        return None

    def describe_loss(self, rank: int) -> str:
        """Why the connection to `rank` ended."""
        return f"rank {rank} left or died"

    def closed(self, in_order: bool) -> None:
        """The last step of `close`. `in_order`: no rank was lost, and with `leaves_together` every rank has closed."""

    def abort(self, exit_code: int) -> None:
        """End the processes of the job."""


class Bootstrap(abc.ABC):
    """A connected group of ranks that exchange bytes.

    Collective calls must come in the same order on every rank. All calls except `abort` must come from one thread at a
    time. After one rank is found lost, every later exchange raises the same RankLostError at once. A `with` block
    closes the group.

    local_rank, local_size: count the ranks of this host.
    hostnames, host_ids: one entry per rank; host_ids distinguish hosts of the same name.
    timeout_s: bounds every blocking call.
    authkey: the secret of this job.
    """

    kind: LauncherKind
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    hostnames: list[str]
    host_ids: list[str]
    timeout_s: float
    authkey: bytes

    def __init__(self, member: Member, timeout_s: float) -> None:
        self.kind = member.kind
        self.rank = member.rank
        self.world_size = member.world_size
        self.local_rank = member.rank if member.local_rank is None else member.local_rank
        self.local_size = member.world_size if member.local_size is None else member.local_size
        self.hostnames = []
        self.host_ids = []
        self.addresses: list[str] = []
        self.authkey = b""
        self.timeout_s = timeout_s
        self._lost: RankLostError | None = None
        self._closed = False
        self._waits_for_stopped = True

    @abc.abstractmethod
    def allgather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order. Raises RankLostError if a rank is gone or silent for `timeout_s`."""

    @abc.abstractmethod
    def broadcast(self, payload: bytes | None = None) -> bytes:
        """Return rank 0's payload; other ranks' arguments are ignored. Raises RankLostError as `allgather` does."""

    def barrier(self) -> None:
        """Return once every rank has called this. Raises RankLostError as `allgather` does."""
        self.allgather(b"")

    @abc.abstractmethod
    def send_command(self, payload: bytes) -> None:
        """Rank 0 only: send a command to every other rank. Raises RankLostError if a rank does not accept it."""

    @abc.abstractmethod
    def next_command(self) -> bytes | None:
        """Other ranks only: return rank 0's next command, or None once rank 0 has closed. Waits without a time limit.

        Raises RankLostError if rank 0 dies or reports another rank lost.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group and free its resources. Bounded in time; a second call does nothing."""

    @abc.abstractmethod
    def abort(self, exit_code: int) -> None:
        """End the job now, without agreement: the other ranks are killed or get RankLostError.

        Under MPI the calling process ends too (MPI_Abort with `exit_code`); under other launchers the call returns.
        """

    def lost_ranks(self) -> list[int]:
        """Ranks whose connections say that they are gone: closed, silent for DISTMK_LINK_TIMEOUT_S, or reported by rank 0.

        Neither waits nor raises; meant to be called during a launch.
        """
        return []

    @property
    def loss(self) -> str | None:
        """A line that says which ranks are gone and why. None until `lost_ranks` names some."""
        return None

    def silence(self) -> str | None:
        """A line that names a rank that is gone, is stopped, or has not answered for SILENCE_S; None if there is none.

        Does not wait.

        To be called on rank 0, about once a second or more often, while the other ranks wait for a command or take part
        in a launch.
        """
        return None

    def send_abort(self, launch: int, reason: int) -> None:  # noqa: B027
        """Tell all other ranks that launch number `launch` is given up. Neither waits long nor raises."""

    def abort_reason(self, launch: int) -> int:
        """The reason for which some rank gave up launch number `launch`; 0 if none did. Neither waits nor raises."""
        return 0

    def meet(self, place: str, timeout_s: float) -> bool:
        """Wait until all ranks have called this with the same `place`.

        Two meetings at the same time must have different places.

        Unlike a collective call it may come at any time, and in any order. False: a rank is lost, or does not come
        within `timeout_s`.
        """
        return True

    def address_of(self, rank: int) -> str:
        """The IP address at which other hosts reach `rank`; loopback if all ranks are on one host."""
        return self.addresses[rank] if self.addresses else "127.0.0.1"

    @contextmanager
    def losing_stopped_ranks(self) -> Iterator[None]:
        """In the block, a rank whose process is stopped (SIGSTOP, a debugger) counts as lost: for the end of a run.

        Elsewhere other ranks wait for such a rank, because it may continue.
        """
        before, self._waits_for_stopped = self._waits_for_stopped, False
        try:
            yield
        finally:
            self._waits_for_stopped = before

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._lost is not None:
            # A new object each time: raising one object again would make its traceback grow.
            raise type(self._lost)(str(self._lost))
        if self._closed:
            raise RuntimeError("this bootstrap is closed")

    def _refuse(self, call: str) -> RuntimeError:
        """The error to raise if a rank makes a call that it must not make."""
        callers = "the ranks other than 0" if self.rank == 0 else "rank 0"
        return RuntimeError(f"{call} is for {callers}, not rank {self.rank}")


def read_timeout_s(env: Mapping[str, str]) -> float:
    """DISTMK_BOOTSTRAP_TIMEOUT_S in seconds, the bound on blocking calls. Raises UsageError if it is not positive."""
    return _read_seconds(env, TIMEOUT_ENV, DEFAULT_TIMEOUT_S)


def read_link_timeout_s(env: Mapping[str, str]) -> float:
    """DISTMK_LINK_TIMEOUT_S: seconds after which a host that does not answer counts as lost.

    UsageError if it is not positive.
    """
    return _read_seconds(env, LINK_TIMEOUT_ENV, DEFAULT_LINK_TIMEOUT_S)


def _read_seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(f"{name} must be a positive number of seconds, at most {MOST_SECONDS:g}, got {shown(text)}")
    return seconds


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 1, 2`, for messages."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
