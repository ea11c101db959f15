"""Connections between rank 0 and the other ranks: framing, time limits and the authenticated handshake."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from distmk.bootstrap.base import name_ranks
from distmk.errors import RankLostError

TICK_S = 0.25  # interval of liveness checks while rank 0 waits
_HANDSHAKE_S = 5.0


class Link:
    """One framed connection to another rank. No single read or write blocks longer than its time limit."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(None)
        self._sock = sock
        self.set_timeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            _set_tcp_options(sock)
        self.conn = Connection(os.dup(sock.fileno()))

    def set_timeout(self, timeout_s: float) -> None:
        """Bound each read and write by the kernel's socket timers, since Connection has no timeouts."""
        timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def send(self, tag: bytes, payload: bytes) -> None:
        """Send one frame: a tag of one byte, then the payload. Raises OSError if the peer is gone or does not read."""
        self.conn.send_bytes(tag + payload)

    def recv(self) -> tuple[bytes, bytes]:
        """Receive one frame as (tag, payload). Raises EOFError or OSError if the peer is gone or stops midway."""
        frame = self.conn.recv_bytes()
        return frame[:1], frame[1:]

    def close(self) -> None:
        """Shut both directions down, which also ends the connection for processes that inherited the descriptor."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if not self.conn.closed:
            self.conn.close()


def _set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and notice within about a minute that the other host went down."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def accept_links(
    server: socket.socket, world_size: int, authkey: bytes, timeout_s: float, check: Callable[[], None]
) -> dict[int, Link]:
    """Rank 0: accept one link from every other rank, by rank. `check` runs every 0.25 s or more often, and may raise.

    Raises RankLostError that names the ranks missing after `timeout_s`.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout_s
    server.settimeout(TICK_S)
    try:
        while len(links) < world_size - 1:
            check()
            if time.monotonic() > deadline:
                missing = [rank for rank in range(1, world_size) if rank not in links]
                raise RankLostError(f"{name_ranks(missing)} did not join rank 0 within {timeout_s:g} s")
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            joined = _authenticate(sock, authkey, timeout_s)
            if joined is None:
                continue
            rank, link = joined
            if rank in links or not 0 < rank < world_size:
                link.close()
                continue
            links[rank] = link
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def _authenticate(sock: socket.socket, authkey: bytes, timeout_s: float) -> tuple[int, Link] | None:
    """The rank behind a new connection and its link; None, and the connection is closed, if it does not know the key."""
    link = Link(sock, _HANDSHAKE_S)
    try:
        if sock.family == socket.AF_UNIX:
            # Any user of the host can connect to an abstract address: turn other users away before the handshake.
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] != os.getuid():
                raise AuthenticationError("another user")
        deliver_challenge(link.conn, authkey)
        answer_challenge(link.conn, authkey)
        rank = int.from_bytes(link.conn.recv_bytes(8), "little")
        link.set_timeout(timeout_s)
        return rank, link
    except (AuthenticationError, EOFError, OSError):
        link.close()
        return None


def join_link(sock: socket.socket, rank: int, authkey: bytes, timeout_s: float) -> Link:
    """Other ranks: the link to rank 0 over a connected socket. Raises RankLostError if rank 0 does not accept it."""
    link = Link(sock, timeout_s)
    try:
        answer_challenge(link.conn, authkey)
        deliver_challenge(link.conn, authkey)
        link.conn.send_bytes(rank.to_bytes(8, "little"))
        return link
    except (AuthenticationError, EOFError, OSError) as error:
        link.close()
        raise RankLostError(f"rank 0 did not let rank {rank} join: {error or type(error).__name__}") from error


def pack(parts: Sequence[bytes]) -> bytes:
    """Join byte strings into one; `unpack` splits it again."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Undo `pack`."""
    parts = []
    offset = 0
    while offset < len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        offset += 8
        parts.append(data[offset : offset + size])
        offset += size
    return parts
