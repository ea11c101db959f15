"""How a connection starts: both sides prove that they know the job's key, without sending it.

Mutual authentication in three passes with a keyed hash (ISO/IEC 9798-4; HMAC of RFC 2104 with SHA-256). The accepting
side sends a random number. The joining side sends its own random number, its rank and a proof. The accepting side
answers with its proof. Messages have fixed sizes, so a stranger cannot make either side read or allocate more. Over a
Unix socket the kernel tells each side the user of the other; both must be the same user.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

from distmk.bootstrap.base import name_ranks
from distmk.bootstrap.link import TICK_S, Link
from distmk.errors import RankLostError, UsageError

_GREETING = b"distmk1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_ANSWER = struct.Struct(f"<{_NONCE_BYTES}sI{_PROOF_BYTES}s")  # the joining side's random number, rank and proof
_REFUSAL = bytes(_PROOF_BYTES)  # sent in place of the accepting side's proof
_HANDSHAKE_S = 5.0
_MOST_PENDING = 256  # connections under way; beyond that the oldest is dropped
_ACCEPTED_AT_ONCE = 64
_RETRY_S = 0.05  # pause before another try to join
_RETRIES_S = 10.0  # after this time there is no other try


class Refused(Exception):
    """The other side does not know the key, is another user, or is not a rank of distmk."""


def _proof(authkey: bytes, side: str, accepting: bytes, joining: bytes, rank: int) -> bytes:
    return hmac.digest(authkey, f"distmk {side} {rank} ".encode() + accepting + joining, "sha256")


def check_same_user(sock: socket.socket) -> None:
    """Refused if the process at the other end of a Unix socket belongs to another user.

    Any user of the host can bind, or connect to, an abstract address.
    """
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise Refused("another user listens there")


class Newcomer:
    """A connection on the accepting side that has not proved its rank yet. Nothing waits for it."""

    def __init__(self, sock: socket.socket, authkey: bytes) -> None:
        self.sock = sock
        self.until = time.monotonic() + _HANDSHAKE_S
        self._authkey, self._answer = authkey, b""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.setblocking(False)
        check_same_user(sock)
        sock.send(_GREETING + self._nonce)

    def advance(self) -> int | None:
        """Read the bytes so far. Returns the rank once it is proved. Refused: wrong proof; OSError: the connection is over."""
        try:
            arrived = self.sock.recv(_ANSWER.size - len(self._answer))
        except BlockingIOError:
            return None
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        self._answer += arrived
        if len(self._answer) < _ANSWER.size:
            return None
        nonce, rank, proof = _ANSWER.unpack(self._answer)
        if not hmac.compare_digest(proof, _proof(self._authkey, "join", self._nonce, nonce, rank)):
            self.sock.send(_REFUSAL)
            raise Refused("another key")
        self.sock.send(_proof(self._authkey, "accept", self._nonce, nonce, rank))
        return int(rank)


class Reception:
    """The accepting side: accepts connections at `server`, many at the same time, until each of `ranks` has joined."""

    def __init__(self, server: socket.socket, ranks: set[int], authkey: bytes, timeout_s: float) -> None:
        self.links: dict[int, Link] = {}
        self.num_refused = 0
        self._server, self._ranks, self._authkey, self._timeout_s = server, ranks, authkey, timeout_s
        self._most = _most_pending()
        self._pending: dict[socket.socket, Newcomer] = {}  # oldest first
        server.setblocking(False)

    def serve(self, deadline: float, check: Callable[[], None]) -> None:
        """Return once all ranks have joined, or at `deadline` (of time.monotonic)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            try:
                while self.links.keys() < self._ranks and time.monotonic() < deadline:
                    check()
                    for key, _ in selector.select(TICK_S):
                        if key.fileobj is self._server:
                            self._accept(selector)
                        elif (newcomer := self._pending.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                            self._advance(selector, newcomer)
                    self._drop(selector, lambda newcomer: newcomer.until < time.monotonic())
            finally:
                self._drop(selector, lambda newcomer: True)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._pending) >= self._most:
                self._forget(selector, next(iter(self._pending.values()))).close()
            try:
                sock, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # the stranger has already left
                if not self._pending:
                    raise UsageError("no file descriptor is left for the other ranks; raise `ulimit -n`") from None
                self._most = max(1, len(self._pending) // 2)
                return
            try:
                newcomer = Newcomer(sock, self._authkey)
            except (Refused, OSError) as error:
                self.num_refused += isinstance(error, Refused)
                sock.close()
                continue
            self._pending[sock] = newcomer
            selector.register(sock, selectors.EVENT_READ)

    def _advance(self, selector: selectors.BaseSelector, newcomer: Newcomer) -> None:
        try:
            rank = newcomer.advance()
        except (Refused, OSError) as error:
            self.num_refused += isinstance(error, Refused)
            self._forget(selector, newcomer).close()
            return
        if rank is None:
            return
        sock = self._forget(selector, newcomer)
        if rank in self.links or rank not in self._ranks:
            sock.close()
        else:
            self.links[rank] = Link(sock, self._timeout_s)

    def _drop(self, selector: selectors.BaseSelector, which: Callable[[Newcomer], bool]) -> None:
        for newcomer in [newcomer for newcomer in self._pending.values() if which(newcomer)]:
            self._forget(selector, newcomer).close()

    def _forget(self, selector: selectors.BaseSelector, newcomer: Newcomer) -> socket.socket:
        selector.unregister(newcomer.sock)
        del self._pending[newcomer.sock]
        return newcomer.sock


def _most_pending() -> int:
    """The limit for connections under way at a time: at most a quarter of the file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_PENDING if limit == resource.RLIM_INFINITY else max(1, min(_MOST_PENDING, limit // 4))


def accept_links(
    server: socket.socket, ranks: set[int], authkey: bytes, timeout_s: float, check: Callable[[], None]
) -> dict[int, Link]:
    """Accept one link from each of `ranks`. `check` runs every 0.25 s or more often, and may raise.

    However many strangers connect and whatever they send, they cannot delay the ranks. Raises RankLostError that names
    the ranks missing after `timeout_s`.
    """
    reception = Reception(server, ranks, authkey, timeout_s)
    try:
        reception.serve(time.monotonic() + timeout_s, check)
        if missing := sorted(ranks - reception.links.keys()):
            refused = reception.num_refused
            strangers = f"; refused for another key or user: {refused}" if refused else ""
            raise RankLostError(f"{name_ranks(missing)} did not join within {timeout_s:g} s{strangers}")
    except BaseException:
        for link in reception.links.values():
            link.close()
        raise
    return reception.links


def join_link(
    connect: Callable[[float], socket.socket], rank: int, authkey: bytes, timeout_s: float, to: str = "rank 0"
) -> Link:
    """The link of `rank` to a rank that accepts. `connect` makes a connection within the given number of seconds.

    If the other side drops the connection unheard, as it does when many strangers connect, this tries again for 10 s.
    OSError: nobody listens there, or there is no answer within `timeout_s`. RankLostError: the other side refuses.
    """
    now = time.monotonic()
    deadline, last_try = now + timeout_s, now + min(timeout_s, _RETRIES_S)
    while True:
        try:
            sock = connect(max(0.1, deadline - time.monotonic()))
            try:
                _join(sock, rank, authkey, deadline)
                return Link(sock, timeout_s)
            except BaseException:
                sock.close()
                raise
        except Refused as error:
            raise RankLostError(f"{to} did not let rank {rank} join: {error}") from None
        except (ConnectionResetError, BrokenPipeError, BlockingIOError) as error:
            if time.monotonic() > last_try:
                raise RankLostError(f"{to} did not let rank {rank} join: {error.strerror}") from None
        time.sleep(_RETRY_S)


def _join(sock: socket.socket, rank: int, authkey: bytes, deadline: float) -> None:
    """The joining side of the handshake. Refused, OSError: it failed."""
    check_same_user(sock)
    greeting = _receive(sock, len(_GREETING) + _NONCE_BYTES, deadline)
    accepting = greeting[len(_GREETING) :]
    if not greeting.startswith(_GREETING):
        raise Refused("another program listens there")
    joining = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_ANSWER.pack(joining, rank, _proof(authkey, "join", accepting, joining, rank)))
    proof = _receive(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(authkey, "accept", accepting, joining, rank)):
        raise Refused("it has another key")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes. ConnectionResetError: the other side closed; TimeoutError: they did not arrive in time."""
    received = b""
    while len(received) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        arrived = sock.recv(size - len(received))
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        received += arrived
    return received
