"""A connection between two ranks. It carries frames of a tag and a payload, and every read and write has a time limit.

Source of the liveness rule: tcp(7), and `struct tcp_info` in linux/tcp.h.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from distmk.bootstrap.base import read_link_timeout_s
from distmk.errors import DistmkError

Take = Callable[[bytes, bytes], bool]

TICK_S = 0.25  # interval of liveness checks while a rank waits for another
MOST_BYTES = 1 << 31  # limit of a frame
_HEAD = struct.Struct("<Qc")  # size of the payload, tag
_READ_BYTES = 1 << 20
_KEEPALIVE_S = 1  # the least time between probes of an idle connection
_MOST_PROBES = 127  # the kernel's limit
_FAREWELL_S = 1.0  # time to send the rest when a link closes
_TCP_INFO = struct.Struct("8B24I")


class Link:
    """One framed connection to another rank; takes over `sock`.

    inbox: frames that were read ahead. ended: why the connection is over; None as long as it is not. Threads may share
    a link: frames never mix, and a frame that was sent in part is finished before the next one begins.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.timeout_s = timeout_s
        self.link_timeout_s = read_link_timeout_s(os.environ)
        if not self.is_unix:
            set_tcp_options(sock, self.link_timeout_s)
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.ended: Exception | None = None
        self._read, self._unsent = bytearray(), bytearray()
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, tag: bytes, payload: bytes) -> None:
        """Send one frame. BlockingIOError: the peer did not read it within `timeout_s`; OSError: it is gone."""
        self.post(tag, payload)
        deadline = time.monotonic() + self.timeout_s
        while self._unsent:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise BlockingIOError(errno.EAGAIN, "the peer does not read")
            wait_writable(self, min(left_s, TICK_S))
            self.flush()

    def post(self, tag: bytes, payload: bytes) -> None:
        """Send as much of one frame as possible without waiting; the rest follows with `flush`. OSError: the peer is gone."""
        if len(payload) > MOST_BYTES:
            raise DistmkError(
                f"a message of {len(payload) >> 20} MiB is too large to send, the limit is {MOST_BYTES >> 20} MiB; "
                "trace fewer iterations"
            )
        with self._lock:
            self._unsent += _HEAD.pack(len(payload), tag)
            self._unsent += payload
        self.flush()

    def flush(self) -> None:
        """Send as much of the earlier frames' rest as possible without waiting. OSError: the peer is gone."""
        with self._lock:
            while self._unsent:
                try:
                    del self._unsent[: self._sock.send(self._unsent)]
                except BlockingIOError:
                    self._check_answers()
                    return

    def pump(self, take: Take) -> None:
        """Read everything that has arrived, without waiting for more, up to the end of the connection (`ended`).

        `take` gets each frame, and returns False for a frame that belongs in the inbox.
        """
        with self._lock:
            if self.ended is not None:
                return
            try:
                while self._read_some():
                    self._split(take)
                self._check_answers()
                self.flush()
            except (DistmkError, EOFError, OSError) as error:
                self.ended = error

    def _read_some(self) -> bool:
        """Whether anything had arrived. EOFError: the peer has closed."""
        try:
            arrived = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        if not arrived:
            raise EOFError
        self._read += arrived
        return True

    def _split(self, take: Take) -> None:
        while len(self._read) >= _HEAD.size:
            size, tag = _HEAD.unpack_from(self._read)
            if size > MOST_BYTES:
                raise OSError(errno.EMSGSIZE, f"a frame of {size} bytes")
            if len(self._read) < _HEAD.size + size:
                return
            payload = bytes(memoryview(self._read)[_HEAD.size : _HEAD.size + size])
            del self._read[: _HEAD.size + size]
            if not take(tag, payload):
                self.inbox.append((tag, payload))

    def _check_answers(self) -> None:
        """OSError (ETIMEDOUT): the other host has not acknowledged anything for DISTMK_LINK_TIMEOUT_S."""
        if not self.is_unix and is_unanswered(self._sock, self.link_timeout_s):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def readable(self) -> bool:
        """Whether data, or the end of the connection, has arrived."""
        return bool(wait([self], 0))

    @property
    def is_unix(self) -> bool:
        """Whether the other side is on this host, as the same user."""
        return self._sock.family == socket.AF_UNIX

    @property
    def is_near(self) -> bool:
        """Whether the other side is on this host, as far as its address tells."""
        peer = self.peer_address()
        return peer == self.own_address() or ipaddress.ip_address(peer.partition("%")[0]).is_loopback

    def peer_address(self) -> str:
        """The IP address of the other side; loopback for a Unix socket."""
        return _address(self._sock, self._sock.getpeername)

    def own_address(self) -> str:
        """The IP address of this side, as the other one sees it."""
        return _address(self._sock, self._sock.getsockname)

    def close(self) -> None:
        """Send the rest, within 1 s, and shut down both directions, also for processes that share the descriptor."""
        if self._sock.fileno() < 0:
            return
        if self._unsent and self.ended is None:
            self.timeout_s = _FAREWELL_S
            with contextlib.suppress(OSError):
                wait_writable(self, _FAREWELL_S)
                self.flush()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def detach(self) -> socket.socket:
        """The socket alone, in blocking mode, for another user. Nothing must have been sent or read ahead."""
        self._sock.setblocking(True)
        return self._sock


def wait(links: Sequence[Link], timeout_s: float | None) -> list[Link]:
    """The links on which data or an end has arrived, after at most `timeout_s` seconds."""
    poll = select.poll()
    by_number = {link.fileno(): link for link in links if link.fileno() >= 0}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def wait_writable(link: Link, timeout_s: float) -> None:
    """Return once the link accepts data or is over, at the latest after `timeout_s` seconds."""
    poll = select.poll()
    poll.register(link.fileno(), select.POLLOUT)
    poll.poll(timeout_s * 1000)


def _address(sock: socket.socket, name: Callable[[], object]) -> str:
    if sock.family == socket.AF_UNIX:
        return "127.0.0.1"
    address = str(name()[0])  # type: ignore[index]
    return address.removeprefix("::ffff:")  # an IPv4 address on a socket for both protocols


def set_tcp_options(sock: socket.socket, link_timeout_s: float) -> None:
    """Send small frames at once, and have the kernel probe an idle connection, which ends after `link_timeout_s`.

    The other kernel answers a probe, so a process that is stopped or busy does not count as lost. TCP_USER_TIMEOUT is
    not used, because it also ends a connection to a healthy host while a process there does not read.
    """
    interval_s = max(_KEEPALIVE_S, math.ceil(link_timeout_s / _MOST_PROBES))
    probes = max(1, math.ceil(link_timeout_s / interval_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def is_unanswered(sock: socket.socket, link_timeout_s: float) -> bool:
    """Whether the other kernel has acknowledged neither data nor probes on a TCP connection for `link_timeout_s`.

    True only if there was something to acknowledge: data that was sent again, or two probes. One probe is not enough,
    as it may be on its way; and while a process does not read, the kernel sends probes less and less often.
    """
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(raw) < _TCP_INFO.size:
        return False
    fields = _TCP_INFO.unpack(raw)
    retransmits, probes, last_ack_ms = fields[2], fields[3], fields[8 + 12]
    return bool((retransmits >= 1 or probes >= 2) and last_ack_ms >= link_timeout_s * 1000)
