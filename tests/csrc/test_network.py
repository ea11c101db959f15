"""The network of the host twin: which frames it applies, which it refuses, and what it costs while nothing happens."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import graphs
from support.ranks_in_process import OPTIONS, SANITIZERS, build_in_one, prefix

from distmk.abi import EVENT_STRIDE_BYTES, Abort, Control, LaunchParams, ProgramHeader
from distmk.backends.build_cache import csrc_dir
from distmk.backends.host import build as host_build
from distmk.backends.host.network import End, _declare
from distmk.backends.launch_block import LaunchBlock
from distmk.backends.launch_spec import LaunchSpec
from distmk.program.program import RankProgram, compile_graph

pytestmark = pytest.mark.timeout(120)

HEAP_BYTES, EVENTS_OFFSET, NUM_EVENTS, GUARD_BYTES = 8192, 4096, 4, 4096
PARCEL, ACK, ABORT, FENCE, LEAVE = 1, 2, 3, 4, 5


@pytest.mark.whole
@pytest.mark.parametrize("sanitizer", ["thread"])
def test_stress(sanitizer: str) -> None:
    """Threads of two ranks put to each other through small sockets: everything arrives, in order, without a deadlock."""
    folder = csrc_dir() / "host"
    sources = [folder / f"{name}.cpp" for name in ("connection", "network", "network_transport", "transport")]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", *SANITIZERS[sanitizer]]
    tool = build_in_one("network_stress", flags, [*sources, Path(__file__).with_name("network_stress.cpp")])
    done = subprocess.run([*prefix(), str(tool)], env=os.environ | OPTIONS, capture_output=True, text=True, timeout=100)
    assert done.stdout == "ok\n" and done.returncode == 0, done.stdout + done.stderr[-3000:]


class Rank:
    """The network of rank 0 of two. This test is the other rank: `peer` is the other end of the socket."""

    def __init__(self, program: RankProgram | None = None) -> None:
        self.library = host_build.load_runtime()
        _declare(self.library)
        self.program = program
        self.header = ProgramHeader(
            num_ranks=2, heap_bytes=HEAP_BYTES, events_heap_offset=EVENTS_OFFSET, num_events=NUM_EVENTS
        )
        if program is not None:
            self.header = program.header
        self.memory = ctypes.create_string_buffer(self.header.heap_bytes + GUARD_BYTES)
        self.heap = ctypes.addressof(self.memory)
        own, self.peer = socket.socketpair()
        sockets = (ctypes.c_int * 2)(-1, own.detach())
        self.network = self.library.distmk_network_open(
            self.heap, ctypes.addressof(self.header), ctypes.addressof(sockets)
        )
        self.peer.settimeout(5)

    def send(self, kind: int, writes: int = 0, signals: int = 0, num_bytes: int = 0, value: int = 0, body: bytes = b""):
        self.peer.sendall(struct.pack("<IIIIQ", kind, writes, signals, num_bytes, value) + body)

    def receive(self) -> tuple[int, int]:
        """Type and value of the next frame."""
        kind, _, _, _, value = struct.unpack("<IIIIQ", self.peer.recv(24, socket.MSG_WAITALL))
        return kind, value

    def launch(self, deadline_s: float) -> None:
        """Run one iteration of the program to its end."""
        assert self.program is not None
        block = LaunchBlock.of(LaunchSpec(num_iterations=1, deadline_s=deadline_s), self.program)
        params, text = LaunchParams(), ctypes.create_string_buffer(self.program.to_bytes())
        block.fill(params)
        local = ctypes.create_string_buffer(self.header.local_bytes + 1)
        bases = (ctypes.c_uint64 * 2)(self.heap, 0)
        params.program, params.local_base = ctypes.addressof(text), ctypes.addressof(local)
        params.heap_bases, params.network, params.spin_polls = ctypes.addressof(bases), self.network, 4
        handle = ctypes.c_void_p()
        self.library.distmk_start(ctypes.addressof(params), ctypes.addressof(handle))
        self.library.distmk_join(ctypes.addressof(handle))

    @property
    def abort(self) -> int:
        return int(Control.from_buffer(self.memory).abort)

    def end(self) -> End:
        """Why the connection is over, once it is."""
        for _ in range(1000):
            if end := self.library.distmk_network_end(self.network, 1):
                return End(end)
            time.sleep(0.005)
        return End.NONE

    def close(self) -> None:
        self.library.distmk_network_close(self.network)
        self.peer.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def writes(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *pair) for pair in pairs)


def signals(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QII", amount, event, 0) for event, amount in pairs)


def test_frames(rank: Rank) -> None:
    """Data and signals are applied and acknowledged. An abort, a fence and an orderly end are recognised."""
    body = writes((64, 3), (HEAP_BYTES - 2, 2)) + signals((3, 5), (3, 2)) + b"abcde"
    rank.send(PARCEL, 2, 2, 5, body=body)
    assert rank.receive() == (ACK, 1)
    assert rank.memory.raw[64:67] == b"abc" and rank.memory.raw[HEAP_BYTES - 2 : HEAP_BYTES] == b"de"
    assert struct.unpack_from("<Q", rank.memory.raw, EVENTS_OFFSET + 3 * EVENT_STRIDE_BYTES) == (7,)
    rank.send(FENCE, value=1)
    rank.library.distmk_network_send_fence(rank.network)
    assert rank.receive() == (FENCE, 1) and rank.library.distmk_network_reached_fence(rank.network, 5_000_000)
    rank.library.distmk_network_send_fence(rank.network)
    assert not rank.library.distmk_network_reached_fence(rank.network, 1000)
    assert rank.abort == 0
    rank.send(ABORT, value=int(Abort.INTERRUPTED))
    rank.send(LEAVE)
    assert rank.end() is End.LEFT and rank.abort == Abort.INTERRUPTED
    assert rank.library.distmk_network_reached_fence(rank.network, 1000)  # nobody waits for a peer that is gone


@pytest.mark.parametrize(
    ("frame", "body"),
    [
        ((0,), b""),
        ((9,), b""),
        ((PARCEL, 1, 0, 4), writes((HEAP_BYTES - 3, 4)) + b"abcd"),
        ((PARCEL, 1, 0, 4), writes((2**64 - 2, 4)) + b"abcd"),
        ((PARCEL, 1, 0, 4), writes((128, 2**63)) + b"abcd"),
        ((PARCEL, 2, 0, 4), writes((128, 4), (HEAP_BYTES, 1)) + b"abcd"),
        ((PARCEL, 1, 0, 4), writes((0, 4)) + b"abcd"),
        ((PARCEL, 1, 0, 4), writes((128, 3)) + b"abcd"),
        ((PARCEL, 1, 1, 4), writes((128, 4)) + signals((NUM_EVENTS, 1)) + b"abcd"),
        ((PARCEL, 1 << 30), b""),
        ((PARCEL, 0, 1 << 30), b""),
        ((PARCEL, 0, 0, 1 << 30), b""),
        ((ACK, 0, 0, 0, 1), b""),
        ((ABORT, 0, 0, 0, 0), b""),
        ((ABORT, 0, 0, 0, 99), b""),
        ((FENCE, 0, 0, 0, 2), b""),
        ((LEAVE, 0, 0, 1), b"x"),
    ],
    ids=itertools.count(),
)
def test_malformed_frames(rank: Rank, frame: tuple[int, ...], body: bytes) -> None:
    """Nothing of a malformed frame is written. The connection ends, and so does the launch."""
    rank.send(*frame, body=body)
    assert rank.end() is End.MALFORMED
    assert rank.abort == Abort.RANK_LOST and not any(rank.memory.raw[8:])


def test_closed_within_a_frame(rank: Rank) -> None:
    rank.peer.sendall(struct.pack("<IIIIQ", PARCEL, 1, 0, 4, 0) + writes((128, 4)) + b"ab")
    rank.peer.shutdown(socket.SHUT_WR)
    assert rank.end() is End.CLOSED and rank.abort == Abort.RANK_LOST and not any(rank.memory.raw[8:])


def test_a_peer_that_does_not_answer() -> None:
    """A worker waits for the peer until its deadline, and then tells the peer to leave."""
    rank = Rank(compile_graph(graphs.ring(2, 1)).ranks[0])
    try:
        rank.launch(deadline_s=0.3)
        assert rank.abort == Abort.HANG
        kind, *_, reason = struct.unpack("<IIIIQ", rank.peer.recv(1 << 20)[-24:])
        assert (kind, reason) == (ABORT, Abort.HANG)
    finally:
        rank.close()


def test_waiting_costs_nothing(rank: Rank) -> None:
    """The receiver sleeps while nothing arrives, and also after the connection has ended."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.4)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
        rank.peer.close()
        assert rank.end() is End.CLOSED
