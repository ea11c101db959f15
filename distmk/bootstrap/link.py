"""Connections between two ranks: framing, time limits and the authenticated handshake."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from distmk.bootstrap.base import name_ranks, read_link_timeout_s
from distmk.errors import DistmkError, RankLostError

TICK_S = 0.25  # interval of liveness checks while rank 0 waits
_HANDSHAKE_S = 5.0
_MOST_HANDSHAKES = 64  # at once; more strangers than that are turned away
_MOST_BYTES = 1 << 31  # of a frame
_KEEPALIVE_S = 1  # between probes of an idle connection


class Link:
    """One framed connection to another rank. No single read or write blocks longer than its time limit.

    inbox: frames that were read ahead. ended: why the connection is over, None while it is not.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(None)
        self._sock = sock
        self.link_timeout_s = read_link_timeout_s(os.environ)
        self.set_timeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            set_tcp_options(sock, self.link_timeout_s)
        self.conn = Connection(os.dup(sock.fileno()))
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.ended: Exception | None = None

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
        frame = self.conn.recv_bytes(_MOST_BYTES)
        return frame[:1], frame[1:]

    def readable(self) -> bool:
        """Whether a frame, or the end of the connection, has arrived."""
        return self.conn.poll(0)

    def pump(self, take: Callable[[bytes, bytes], bool]) -> None:
        """Read the frames that have arrived, without waiting for more. `take` returns false for a frame of the inbox."""
        try:
            while self.readable():
                tag, payload = self.recv()
                if not take(tag, payload):
                    self.inbox.append((tag, payload))
        except (DistmkError, EOFError, OSError) as error:
            self.ended = error

    @property
    def is_unix(self) -> bool:
        """Whether the other side is on this host, as the same user."""
        return self._sock.family == socket.AF_UNIX

    def peer_address(self) -> str:
        """The IP address of the other side; loopback for a Unix socket."""
        if self.is_unix:
            return "127.0.0.1"
        return str(self._sock.getpeername()[0]).removeprefix("::ffff:")  # an IPv4 address on a socket for both

    def own_address(self) -> str:
        """The IP address of this side, as the other one sees it; loopback for a Unix socket."""
        if self.is_unix:
            return "127.0.0.1"
        return str(self._sock.getsockname()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """Shut both directions down, which also ends the connection for processes that inherited the descriptor."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if not self.conn.closed:
            self.conn.close()

    def detach(self) -> socket.socket:
        """The socket alone, without time limits, which goes on in other hands; nothing must have been read ahead."""
        self.conn.close()
        never = struct.pack("@ll", 0, 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, never)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, never)
        return self._sock


def set_tcp_options(sock: socket.socket, link_timeout_s: float) -> None:
    """Send small frames at once, and end the connection if the other host does not answer for `link_timeout_s`.

    The kernel probes idle connections, so that a process that is stopped or busy is not taken for a lost one.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(link_timeout_s * 1000))


def accept_links(
    server: socket.socket, ranks: set[int], authkey: bytes, timeout_s: float, check: Callable[[], None]
) -> dict[int, Link]:
    """Accept one link from each of `ranks`. `check` runs every 0.25 s or more often, and may raise.

    Strangers are turned away beside each other, so that none of them holds up the ranks. Raises RankLostError that names
    the ranks missing after `timeout_s`.
    """
    links: dict[int, Link] = {}
    joined: queue.Queue[tuple[int, Link]] = queue.Queue()
    slots = threading.Semaphore(_MOST_HANDSHAKES)
    deadline = time.monotonic() + timeout_s
    server.settimeout(TICK_S / 10)
    try:
        while links.keys() < ranks:
            check()
            if time.monotonic() > deadline:
                missing = sorted(ranks - links.keys())
                raise RankLostError(f"{name_ranks(missing)} did not join within {timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                sock, _ = server.accept()
                if slots.acquire(blocking=False):
                    work = (sock, authkey, timeout_s, joined, slots)
                    threading.Thread(target=_let_in, args=work, daemon=True).start()
                else:
                    sock.close()
            while not joined.empty():
                rank, link = joined.get()
                if rank in links or rank not in ranks:
                    link.close()
                else:
                    links[rank] = link
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def _let_in(
    sock: socket.socket,
    authkey: bytes,
    timeout_s: float,
    joined: queue.Queue[tuple[int, Link]],
    slots: threading.Semaphore,
) -> None:
    """Hand the link of a connection that knows the key to `joined`; close any other connection."""
    link = Link(sock, _HANDSHAKE_S)
    try:
        check_same_user(sock)
        deliver_challenge(link.conn, authkey)
        answer_challenge(link.conn, authkey)
        rank = int.from_bytes(link.conn.recv_bytes(8), "little")
        link.set_timeout(timeout_s)
        joined.put((rank, link))
    except (AuthenticationError, EOFError, OSError):
        link.close()
    finally:
        slots.release()


def check_same_user(sock: socket.socket) -> None:
    """AuthenticationError if the process at the other end of a Unix socket is another user's.

    Any user of a host can bind, or connect to, an abstract address.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise AuthenticationError("another user listens there")


def join_link(sock: socket.socket, rank: int, authkey: bytes, timeout_s: float, to: str = "rank 0") -> Link:
    """The link of `rank` over a connected socket to a rank that accepts. Raises RankLostError if it does not let it in."""
    link = Link(sock, timeout_s)
    try:
        check_same_user(sock)
        answer_challenge(link.conn, authkey)
        deliver_challenge(link.conn, authkey)
        link.conn.send_bytes(rank.to_bytes(8, "little"))
        return link
    except (AuthenticationError, EOFError, OSError) as error:
        link.close()
        raise RankLostError(f"{to} did not let rank {rank} join: {error or type(error).__name__}") from error
