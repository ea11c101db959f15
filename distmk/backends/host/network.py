"""The network of the host twin: the connection to ranks that share no memory with this one (csrc/host/network.h)."""

from __future__ import annotations

import ctypes
import enum
import os
import time
import weakref

from distmk.abi import Abort
from distmk.backends.host.shm import SharedHeap
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.base import name_ranks
from distmk.bootstrap.pairs import connect_pairs
from distmk.errors import RankLostError

_WAIT_S = 0.1  # wait for a fence; in between, Python handles signals
_NO_SOCKET = -1


class End(enum.IntEnum):
    """Why a connection is over, as Connection::End of csrc/host/connection.h."""

    NONE = 0
    LEFT = 1
    CLOSED = 2
    NO_ANSWER = 3
    MALFORMED = 4


class Network:
    """Connections to all far ranks of `heap`, and the thread that applies their puts. Collective.

    `number`: for `LaunchParams.network`; 0 if no rank is far. RankLostError on every rank: a rank could not be
    connected.
    """

    def __init__(
        self, library: ctypes.CDLL, bootstrap: Bootstrap, heap: SharedHeap, program: ctypes.Array[ctypes.c_char]
    ):
        self._library, self._bootstrap = library, bootstrap
        self._far = heap.far_ranks
        self.number = 0
        if not self._far:
            return  # no rank has far ranks
        sockets = connect_pairs(bootstrap, self._far)
        _declare(library)
        by_rank = (ctypes.c_int * bootstrap.world_size)(*[_NO_SOCKET] * bootstrap.world_size)
        for rank, sock in sockets.items():
            by_rank[rank] = sock.detach()
        own = heap.bases[heap.rank]
        self.number = library.distmk_network_open(own, ctypes.addressof(program), ctypes.addressof(by_rank))
        # Also called if the network is dropped; until then it writes to the heap.
        self._leave = weakref.finalize(self, _leave, library, self.number, os.getpid(), (heap, program))

    def abort(self, reason: Abort) -> None:
        """Make the far ranks leave the launch."""
        if self.number:
            self._library.distmk_network_abort(self.number, int(reason))

    def drain(self) -> None:
        """Wait until everything that the far ranks sent in the last launch has arrived.

        Collective; no rank may be in a launch.

        RankLostError: a rank is still connected but does not answer within the bootstrap's `timeout_s`.
        """
        if not self.number:
            return
        self._library.distmk_network_send_fence(self.number)
        until = time.monotonic() + self._bootstrap.timeout_s
        while not self._library.distmk_network_reached_fence(self.number, int(_WAIT_S * 1e6)):
            if lost := self._bootstrap.lost_ranks():
                raise RankLostError(self._bootstrap.loss or f"{name_ranks(lost)} left or died")
            if time.monotonic() > until:
                raise RankLostError(
                    f"{name_ranks(self._far)} did not end the last launch within {self._bootstrap.timeout_s:g} s"
                )

    def ends(self) -> dict[int, End]:
        """For each rank whose connection is over, the reason."""
        ends = {rank: End(self._library.distmk_network_end(self.number, rank)) for rank in self._far if self.number}
        return {rank: end for rank, end in ends.items() if end is not End.NONE}

    def close(self) -> None:
        """Leave the far ranks in order. A forked child has the sockets but not the thread, so it leaves them alone."""
        if self.number:
            self._leave()
        self.number = 0


def _leave(library: ctypes.CDLL, number: int, owner_pid: int, used: object) -> None:
    """Close network `number`. `used` are the objects that it needs until then."""
    if os.getpid() == owner_pid:
        library.distmk_network_close(number)


def _declare(library: ctypes.CDLL) -> None:
    number, rank, time_us, address = ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    library.distmk_network_open.restype = library.distmk_network_end.restype = number
    library.distmk_network_open.argtypes = [ctypes.c_uint64, address, address]
    library.distmk_network_close.argtypes = library.distmk_network_send_fence.argtypes = [number]
    library.distmk_network_abort.argtypes = [number, ctypes.c_uint64]
    library.distmk_network_reached_fence.argtypes = [number, time_us]
    library.distmk_network_end.argtypes = [number, rank]
