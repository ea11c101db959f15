"""The host twin's network to ranks on other hosts: sockets opened here, and used by csrc/host/network.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from distmk.abi import Abort, LaunchParams
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.pairs import NUM_CHANNELS, connect_pairs

_FUNCTIONS = {
    "distmk_network_open": ([ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p),
    "distmk_network_begin_launch": ([ctypes.c_void_p], None),
    "distmk_network_abort": ([ctypes.c_void_p, ctypes.c_uint64], None),
    "distmk_network_lost": ([ctypes.c_void_p, ctypes.c_void_p], None),
    "distmk_network_close": ([ctypes.c_void_p], None),
}


class Network:
    """Connections of this rank to `far_ranks`; they outlive launches, and expose this rank's heap. Collective.

    `params`: program and heaps. RankLostError or UsageError on every rank: a rank cannot be reached.
    """

    def __init__(
        self, library: ctypes.CDLL, bootstrap: Bootstrap, far_ranks: Sequence[int], params: LaunchParams
    ) -> None:
        self._library, self._num_ranks = library, bootstrap.world_size
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        sockets = connect_pairs(bootstrap, far_ranks)
        numbers = (ctypes.c_int * (NUM_CHANNELS * self._num_ranks))(*[-1] * (NUM_CHANNELS * self._num_ranks))
        for rank, channels in sockets.items():
            for channel, sock in enumerate(channels):
                numbers[NUM_CHANNELS * rank + channel] = sock.detach()  # closed by the library
        self.address: int = library.distmk_network_open(ctypes.addressof(params), ctypes.addressof(numbers))

    def begin_launch(self) -> None:
        """Drop from now on what other ranks sent in earlier launches. No launch may be under way."""
        self._library.distmk_network_begin_launch(self.address)

    def abort(self, reason: Abort) -> None:
        """Tell the far ranks to leave the launch."""
        self._library.distmk_network_abort(self.address, int(reason))

    def lost_ranks(self) -> list[int]:
        """Ranks whose connection has ended."""
        lost = (ctypes.c_uint8 * self._num_ranks)()
        self._library.distmk_network_lost(self.address, ctypes.addressof(lost))
        return [rank for rank, is_lost in enumerate(lost) if is_lost]

    def close(self) -> None:
        """Close the connections. No launch may be under way."""
        if self.address:
            self._library.distmk_network_close(self.address)
        self.address = 0
