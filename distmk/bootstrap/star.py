"""Ranks joined in a star through rank 0, over stream sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

from distmk.bootstrap.base import Bootstrap, LaunchKind, name_ranks, pack, unpack
from distmk.errors import JobClosedError, RankLostError

_GATHER = b"g"
_BROADCAST = b"b"
_COMMAND = b"c"
_CLOSE = b"q"
_LOST = b"x"

_TICK_S = 0.25
_HANDSHAKE_S = 5.0
_CLOSE_SEND_S = 1.0
# A spoke waits a little longer than rank 0, whose report names the rank that is really missing.
_SPOKE_SLACK_S = 5.0


class Link:
    """One framed connection to another rank, on which no single read or write blocks longer than its bound."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(None)
        self._sock = sock
        self.set_timeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            _watch_for_host_loss(sock)
        self.conn = Connection(os.dup(sock.fileno()))

    def set_timeout(self, timeout_s: float) -> None:
        """Bound each read and write by the kernel's own timers: Connection itself knows no timeout."""
        timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def send(self, tag: bytes, payload: bytes) -> None:
        """Send one frame. Raises OSError if the peer is gone or does not read."""
        self.conn.send_bytes(tag + payload)

    def recv(self) -> tuple[bytes, bytes]:
        """Receive one frame. Raises EOFError or OSError if the peer is gone or stops midway."""
        frame = self.conn.recv_bytes()
        return frame[:1], frame[1:]

    def close(self) -> None:
        """Close both directions, also for processes that inherited the descriptor."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if not self.conn.closed:
            self.conn.close()


def _watch_for_host_loss(sock: socket.socket) -> None:
    """Let an idle TCP connection notice, within about a minute, that the other host went down."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def accept_links(
    server: socket.socket, world_size: int, authkey: bytes, timeout_s: float, check: Callable[[], None]
) -> dict[int, Link]:
    """Rank 0: wait until every other rank has joined; `check` runs often and may raise.

    Raises RankLostError naming the ranks that did not come within `timeout_s`.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout_s
    server.settimeout(_TICK_S)
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
            joined = _admit(sock, authkey, timeout_s)
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


def _admit(sock: socket.socket, authkey: bytes, timeout_s: float) -> tuple[int, Link] | None:
    """Check who connected; a stranger is dropped and gets no say in the job."""
    link = Link(sock, _HANDSHAKE_S)
    try:
        if sock.family == socket.AF_UNIX:
            # Anyone on the host may connect to an abstract address: turn other users away before talking.
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
    """Other ranks: take part in the job behind a connected socket. Raises RankLostError if rank 0 does not answer."""
    link = Link(sock, timeout_s)
    try:
        answer_challenge(link.conn, authkey)
        deliver_challenge(link.conn, authkey)
        link.conn.send_bytes(rank.to_bytes(8, "little"))
        return link
    except (AuthenticationError, EOFError, OSError) as error:
        link.close()
        raise RankLostError(f"rank 0 did not let rank {rank} join: {error or type(error).__name__}") from error


class StarHub(Bootstrap):
    """Rank 0 of a star; it takes over `links`, one to each other rank."""

    def __init__(self, kind: LaunchKind, links: Mapping[int, Link], timeout_s: float) -> None:
        super().__init__(kind, 0, len(links) + 1, timeout_s)
        self._links = dict(sorted(links.items()))

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        parts = {0: payload}
        deadline = time.monotonic() + self.timeout_s
        while len(parts) < self.world_size:
            pending = {link.conn: rank for rank, link in self._links.items() if rank not in parts}
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = list(pending.values())
                raise self._lose(missing[0], f"{name_ranks(missing)} did not answer rank 0 within {self.timeout_s:g} s")
            ready = wait(list(pending), min(left_s, _TICK_S))
            if not ready:
                self._check_peers()
            for conn in ready:
                rank = pending[conn]  # type: ignore[index]
                parts[rank] = self._take(rank)
        everything = pack([parts[rank] for rank in range(self.world_size)])
        self._tell_all(_GATHER, everything)
        return unpack(everything)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        if payload is None:
            raise RuntimeError("rank 0 must give the payload of a broadcast")
        self._tell_all(_BROADCAST, payload)
        return payload

    def send_command(self, payload: bytes) -> None:
        self._check_usable()
        self._tell_all(_COMMAND, payload)

    def next_command(self) -> bytes | None:
        self._check_is_hub(False, "next_command")
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.set_timeout(_CLOSE_SEND_S)
                link.send(_CLOSE, b"")
            link.close()

    def abort(self, exit_code: int) -> None:
        self._closed = True
        self._lost = RankLostError("this rank has ended the job")
        for link in self._links.values():
            link.close()

    def _check_peers(self) -> None:
        """Raise RankLostError if a rank is known dead by other means than its connection."""

    def _why_lost(self, rank: int) -> str:
        """Say what became of a rank whose connection ended."""
        return f"rank {rank} left or died"

    def _take(self, rank: int) -> bytes:
        try:
            tag, payload = self._links[rank].recv()
        except (EOFError, OSError) as error:
            raise self._lose(rank, self._why_lost(rank)) from error
        if tag != _GATHER:
            raise RuntimeError(f"rank {rank} is out of step with rank 0: it sent {tag!r}")
        return payload

    def _tell_all(self, tag: bytes, payload: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(tag, payload)
            except BlockingIOError as error:
                raise self._lose(rank, f"rank {rank} did not read from rank 0 within {self.timeout_s:g} s") from error
            except OSError as error:
                raise self._lose(rank, self._why_lost(rank)) from error

    def _lose(self, lost_rank: int, text: str) -> RankLostError:
        """Remember the loss and tell the remaining ranks, none of which may delay the report."""
        self._lost = RankLostError(text)
        for rank, link in self._links.items():
            if rank != lost_rank:
                with contextlib.suppress(OSError):
                    link.set_timeout(_CLOSE_SEND_S)
                    link.send(_LOST, text.encode())
        return RankLostError(text)


class StarSpoke(Bootstrap):
    """Any rank but 0 of a star; it takes over `link`, which leads to rank 0."""

    def __init__(self, kind: LaunchKind, link: Link, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(kind, rank, world_size, timeout_s)
        self._link = link

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        # If rank 0 is gone, what it still sent says why; so the answer is read even when sending failed.
        with contextlib.suppress(OSError):
            self._link.send(_GATHER, payload)
        return unpack(self._expect(_GATHER))

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        return self._expect(_BROADCAST)

    def send_command(self, payload: bytes) -> None:
        self._check_is_hub(True, "send_command")

    def next_command(self) -> bytes | None:
        self._check_usable()
        tag, payload = self._read(None)
        if tag == _CLOSE:
            return None
        if tag != _COMMAND:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {tag!r} instead of a command")
        return payload

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._link.close()

    def abort(self, exit_code: int) -> None:
        self._lost = RankLostError("this rank has ended the job")
        self.close()

    def _expect(self, wanted: bytes) -> bytes:
        tag, payload = self._read(self.timeout_s + _SPOKE_SLACK_S)
        if tag == _CLOSE:
            raise self._lose("rank 0 closed the job while this rank still waited for it", JobClosedError)
        if tag != wanted:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {tag!r} instead of {wanted!r}")
        return payload

    def _read(self, timeout_s: float | None) -> tuple[bytes, bytes]:
        try:
            if not self._link.conn.poll(timeout_s):
                raise self._lose(f"rank 0 did not answer within {self.timeout_s:g} s")
            tag, payload = self._link.recv()
        except (EOFError, OSError) as error:
            raise self._lose("rank 0 left or died") from error
        if tag == _LOST:
            raise self._lose(payload.decode())
        return tag, payload

    def _lose(self, text: str, kind: type[RankLostError] = RankLostError) -> RankLostError:
        self._lost = kind(text)
        return kind(text)
