"""The transport between ranks: a star of stream sockets with rank 0 at its centre, whatever the launcher."""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import wait

from distmk.bootstrap.base import Bootstrap, Member, name_ranks
from distmk.bootstrap.link import TICK_S, Link, pack, unpack
from distmk.errors import JobClosedError, RankLostError

# Frame tags.
_GATHER = b"g"
_BROADCAST = b"b"
_COMMAND = b"c"
_CLOSE = b"q"  # rank 0 closes
_LEAVE = b"l"  # a rank closes and waits until all do (`Launcher.leaves_together`)
_LOST = b"x"  # a rank is lost; the payload says which

_FAREWELL_S = 1.0
# Other ranks wait a little longer than rank 0, whose report names the missing rank.
_REPORT_S = 5.0


class Launcher:
    """What a launcher adds to a star. These defaults are for a launcher that adds nothing."""

    leaves_together = False  # whether `close` waits until every rank closes

    def check_joining(self) -> None:
        """Called every 0.25 s or more often while rank 0 waits for the others to join. May raise RankLostError."""

    def describe_exit(self, rank: int) -> str | None:
        """How the process of `rank` ended; None while it runs, or if the launcher cannot tell."""
        return None

    def describe_loss(self, rank: int) -> str:
        """Why the connection to `rank` ended."""
        return f"rank {rank} left or died"

    def closed(self, in_order: bool) -> None:
        """The last step of `close`. `in_order`: no rank was lost, and with `leaves_together` every rank has closed."""

    def abort(self, exit_code: int) -> None:
        """End the processes of the job."""


class Star(Bootstrap):
    """What rank 0 and the other ranks share."""

    def __init__(self, member: Member, timeout_s: float, launcher: Launcher) -> None:
        super().__init__(member, timeout_s)
        self._launcher = launcher
        self._owner_pid = os.getpid()

    def close(self) -> None:
        # A forked child shares the sockets, but its exit must not end its parent's job.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self._announce_close()
        in_order = self._lost is None
        if in_order and self._launcher.leaves_together:
            in_order = self._leave_together()
        self._close_links()
        self._launcher.closed(in_order)

    def abort(self, exit_code: int) -> None:
        self._closed = True
        self._lost = RankLostError("this rank has ended the job")
        self._launcher.abort(exit_code)
        self._close_links()

    @abc.abstractmethod
    def _announce_close(self) -> None:
        """Tell the other ranks, without waiting for them, that this one closes."""

    @abc.abstractmethod
    def _leave_together(self) -> bool:
        """Wait until every rank closes, up to `timeout_s`; False if one is lost or does not."""

    @abc.abstractmethod
    def _close_links(self) -> None: ...


class StarHub(Star):
    """Rank 0 of a star; takes over `links`, one to each other rank."""

    def __init__(self, member: Member, links: Mapping[int, Link], timeout_s: float, launcher: Launcher) -> None:
        super().__init__(member, timeout_s, launcher)
        self._links = dict(sorted(links.items()))

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        parts = {0: payload} | self._collect(_GATHER)
        packed = pack([parts[rank] for rank in range(self.world_size)])
        self._send_all(_GATHER, packed)
        return unpack(packed)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        if payload is None:
            raise RuntimeError("rank 0 must give the payload of a broadcast")
        self._send_all(_BROADCAST, payload)
        return payload

    def send_command(self, payload: bytes) -> None:
        self._check_usable()
        self._send_all(_COMMAND, payload)

    def next_command(self) -> bytes | None:
        raise self._refuse("next_command")

    def _announce_close(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.set_timeout(_FAREWELL_S)
                link.send(_CLOSE, b"")

    def _leave_together(self) -> bool:
        try:
            self._collect(_LEAVE)
            self._send_all(_LEAVE, b"")
        except (RankLostError, RuntimeError):
            return False
        return True

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    def _collect(self, tag: bytes) -> dict[int, bytes]:
        """One frame with `tag` from every other rank. Raises RankLostError if a rank is gone or silent for `timeout_s`."""
        parts: dict[int, bytes] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(parts) < len(self._links):
            pending = {link.conn: rank for rank, link in self._links.items() if rank not in parts}
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = list(pending.values())
                raise self._lose(missing[0], f"{name_ranks(missing)} did not answer rank 0 within {self.timeout_s:g} s")
            ready = wait(list(pending), min(left_s, TICK_S))
            if not ready:
                self._check_processes()
            for conn in ready:
                rank = pending[conn]  # type: ignore[index]
                parts[rank] = self._receive(rank, tag)
        return parts

    def _check_processes(self) -> None:
        """Raise RankLostError if the launcher knows that a rank has ended, and nothing of it is left to read."""
        for rank, link in self._links.items():
            text = self._launcher.describe_exit(rank)
            if text is not None and not link.conn.poll(0):
                raise self._lose(rank, text)

    def _receive(self, rank: int, wanted: bytes) -> bytes:
        try:
            tag, payload = self._links[rank].recv()
        except (EOFError, OSError) as error:
            raise self._lose(rank, self._launcher.describe_loss(rank)) from error
        if tag == wanted:
            return payload
        if tag == _LEAVE:
            raise self._lose(rank, f"rank {rank} left the job")
        raise RuntimeError(f"rank {rank} is out of step with rank 0: it sent {tag!r} instead of {wanted!r}")

    def _send_all(self, tag: bytes, payload: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(tag, payload)
            except BlockingIOError as error:
                raise self._lose(rank, f"rank {rank} did not read from rank 0 within {self.timeout_s:g} s") from error
            except OSError as error:
                raise self._lose(rank, self._launcher.describe_loss(rank)) from error

    def _lose(self, lost_rank: int, text: str) -> RankLostError:
        """Record the loss and report it to the other ranks, of which none may delay the report to the next."""
        self._lost = RankLostError(text)
        for rank, link in self._links.items():
            if rank != lost_rank:
                with contextlib.suppress(OSError):
                    link.set_timeout(_FAREWELL_S)
                    link.send(_LOST, text.encode())
        return RankLostError(text)


class StarSpoke(Star):
    """Any rank but 0 of a star; takes over `link`, its connection to rank 0."""

    def __init__(self, member: Member, link: Link, timeout_s: float, launcher: Launcher) -> None:
        super().__init__(member, timeout_s, launcher)
        self._link = link
        self._hub_closed = False

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        # If sending fails, rank 0 is gone, and its last frame may say why: so read in any case.
        with contextlib.suppress(OSError):
            self._link.send(_GATHER, payload)
        return unpack(self._expect(_GATHER))

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        return self._expect(_BROADCAST)

    def send_command(self, payload: bytes) -> None:
        raise self._refuse("send_command")

    def next_command(self) -> bytes | None:
        self._check_usable()
        if self._hub_closed:
            return None
        tag, payload = self._receive(None)
        if tag == _CLOSE:
            self._hub_closed = True
            return None
        if tag != _COMMAND:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {tag!r} instead of a command")
        return payload

    def _announce_close(self) -> None:
        if self._launcher.leaves_together and self._lost is None:
            with contextlib.suppress(OSError):
                self._link.send(_LEAVE, b"")

    def _leave_together(self) -> bool:
        deadline = time.monotonic() + self.timeout_s
        try:
            # Commands that nobody takes any more, and rank 0's close, may come first.
            while self._receive(max(0.0, deadline - time.monotonic()))[0] != _LEAVE:
                pass
        except RankLostError:
            return False
        return True

    def _close_links(self) -> None:
        self._link.close()

    def _expect(self, wanted: bytes) -> bytes:
        tag, payload = self._receive(self.timeout_s + _REPORT_S)
        if tag == _CLOSE:
            raise self._lose("rank 0 closed the job while this rank still waited for it", JobClosedError)
        if tag != wanted:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {tag!r} instead of {wanted!r}")
        return payload

    def _receive(self, timeout_s: float | None) -> tuple[bytes, bytes]:
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
