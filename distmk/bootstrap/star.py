"""The transport between ranks: a star of stream sockets with rank 0 at its centre, whatever the launcher."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from functools import partial

from distmk.bootstrap.base import Bootstrap, Launcher, Member, name_ranks
from distmk.bootstrap.link import TICK_S, Link, wait
from distmk.bootstrap.messages import malformed, pack, unpack
from distmk.bootstrap.news import ABORT, LOST, MEET, Loss, News, encode_abort, is_malformed, is_unreachable, lost_host
from distmk.errors import JobClosedError, RankLostError
from distmk.interrupts import check_patience

# Frame tags of collective calls.
_GATHER = b"g"
_BROADCAST = b"b"
_COMMAND = b"c"
_CLOSE = b"q"  # rank 0 closes

# Other ranks wait a little longer than rank 0, whose report names the missing rank.
_REPORT_S = 5.0
_TOGETHER_S = 0.3  # connections of processes that die together end within this time
_TCP_TICK_S = 1.0
_LEAVING = "closing"  # the meeting place of ranks that close in order


class Star(Bootstrap):
    """What rank 0 and the other ranks share; takes over `links`, by rank, and `authkey`, with which they were made."""

    def __init__(
        self, member: Member, links: Mapping[int, Link], authkey: bytes, timeout_s: float, launcher: Launcher
    ) -> None:
        super().__init__(member, timeout_s)
        self.authkey = authkey
        self._links = dict(sorted(links.items()))
        self._launcher = launcher
        self._news = News()
        self._owner_pid = os.getpid()

    def close(self) -> None:
        # A forked child shares the sockets, but its exit must not end its parent's job.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._announce_close()
        in_order = self._lost is None
        if in_order and self._launcher.leaves_together:
            in_order = self.meet(_LEAVING, self.timeout_s)
        self._closed = True
        self._close_links()
        self._launcher.closed(in_order)

    def abort(self, exit_code: int) -> None:
        self._closed = True
        self._lost = RankLostError("this rank has ended the job")
        self._launcher.abort(exit_code)
        self._close_links()

    def links(self) -> list[Link]:
        """The connections of this rank."""
        return list(self._links.values())

    def lost_ranks(self) -> list[int]:
        self._listen()
        if self._news.loss is None:
            return [rank for rank, link in self._links.items() if link.ended is not None]  # closed in order
        return list(self._news.loss.ranks)

    @property
    def loss(self) -> str | None:
        return self._news.loss.text if self._news.loss else None

    def tell_abort(self, launch: int, reason: int) -> None:
        self._news.aborts.setdefault(launch, reason)
        self._tell(ABORT, encode_abort(launch, reason))

    def told_abort(self, launch: int) -> int:
        self._listen()
        for past in [each for each in self._news.aborts if each < launch]:
            del self._news.aborts[past]
        return self._news.aborts.get(launch, 0)

    def _announce_close(self) -> None:
        """Tell the other ranks, without waiting for them, that this one closes."""

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    def _tell(self, tag: bytes, payload: bytes, but: int | None = None) -> None:
        """Send a frame to all ranks at the other ends but `but`, without waiting for any; what is left follows later."""
        for rank, link in self._links.items():
            if rank != but and link.ended is None:
                with contextlib.suppress(OSError):
                    link.post(tag, payload)

    def _listen(self) -> None:
        """Read whatever has arrived, without waiting, and record a loss."""
        if self._closed or self._lost is not None:
            return
        for rank, link in self._links.items():
            if link.ended is None:
                self._pump(rank, link)
        if self._news.loss is not None:
            self._lose(self._news.loss)

    def _pump(self, rank: int, link: Link) -> None:
        """Take in the frames of `rank` that have arrived, up to the end of the connection, which is a loss."""
        known = set(self._news.aborts)
        link.pump(partial(self._take, rank))
        if self.rank == 0:
            for launch in self._news.aborts.keys() - known:
                self._tell(ABORT, encode_abort(launch, self._news.aborts[launch]), but=rank)
        in_order = any(tag == _CLOSE for tag, _ in link.inbox)
        if link.ended is not None and not in_order and self._news.loss is None:
            self._news.loss = self._find_loss(rank, link)

    def _take(self, rank: int, tag: bytes, payload: bytes) -> bool:
        return self._news.take(tag, payload, rank)

    def _find_loss(self, rank: int, link: Link) -> Loss:
        """The loss that the end of a connection means: of a host, or of the processes that ended together with this one."""
        if link.ended is not None and is_unreachable(link.ended):
            return lost_host(rank, self.host_ids, self.hostnames, link.link_timeout_s)
        if is_malformed(link.ended):
            return Loss((rank,), str(malformed(f"rank {rank}", "message")))
        text = self._launcher.describe_loss(rank)
        until = time.monotonic() + _TOGETHER_S
        others = {each: other for other, each in self._links.items() if each.ended is None}
        while others and (left_s := until - time.monotonic()) > 0:
            for each in wait(list(others), left_s):
                each.pump(partial(self._take, others.pop(each)))
        ranks = tuple(other for other, each in self._links.items() if each.ended is not None)
        return Loss(ranks, text if len(ranks) == 1 else f"{name_ranks(ranks)} left or died")

    def _lose(self, loss: Loss, kind: type[RankLostError] = RankLostError) -> RankLostError:
        """Record the loss and report it, from rank 0, to the other ranks."""
        self._news.loss = self._news.loss or loss
        self._lost = kind(self._news.loss.text)
        if self.rank == 0:
            self._tell(LOST, self._news.loss.encode())
        return kind(self._news.loss.text)

    def _next_frame(self, rank: int) -> tuple[bytes, bytes] | None:
        """The next frame of a collective call from `rank`, if it has arrived. RankLostError: a rank is gone."""
        link = self._links[rank]
        if not link.inbox and link.ended is None:
            self._pump(rank, link)
        # Rank 0 reports a loss before it closes for that reason.
        if link.inbox and not (self._news.loss and link.inbox[0][0] == _CLOSE):
            return link.inbox.popleft()
        if self._news.loss is not None:
            raise self._lose(self._news.loss)
        return None


class StarHub(Star):
    """Rank 0 of a star, with a link to each other rank."""

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        parts = {0: payload} | self._collect(_GATHER)
        packed = pack([parts[rank] for rank in range(self.world_size)])
        self._send_all(_GATHER, packed)
        return unpack(packed, "rank 0", self.world_size)

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

    def meet(self, place: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        met = self._news.met.setdefault(place, set())
        while not met >= set(self._links):
            self._listen()
            if self._lost is not None or time.monotonic() > deadline:
                return False
            wait(self.links(), TICK_S)
        del self._news.met[place]
        self._tell(MEET, place.encode())
        return True

    def _announce_close(self) -> None:
        self._tell(_CLOSE, b"")

    def _collect(self, tag: bytes) -> dict[int, bytes]:
        """One frame with `tag` from every other rank. Raises RankLostError if a rank is gone or silent for `timeout_s`."""
        parts: dict[int, bytes] = {}
        deadline = time.monotonic() + self.timeout_s
        while True:
            for rank in self._links:
                if rank not in parts and (frame := self._next_frame(rank)) is not None:
                    parts[rank] = self._expect(rank, frame, tag)
            pending = [rank for rank in self._links if rank not in parts]
            if not pending:
                return parts
            if leaving := sorted(self._news.met.get(_LEAVING, set()) & set(pending)):
                raise self._lose(Loss(tuple(leaving), f"rank {leaving[0]} left the job"))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = f"{name_ranks(pending)} did not answer rank 0 within {self.timeout_s:g} s"
                raise self._lose(Loss(tuple(pending), text))
            if not wait([self._links[rank] for rank in pending], min(left_s, TICK_S)):
                self._check_processes()
                check_patience()

    def _check_processes(self) -> None:
        """Raise RankLostError if the launcher knows that a rank has ended, or is stopped where that counts, and nothing of it
        is left to read.
        """
        for rank, link in self._links.items():
            text = self._launcher.describe_exit(rank)
            if text is None and not self._waits_for_stopped:
                text = self._launcher.describe_stop(rank)
            if text is not None and not link.inbox and not link.readable():
                raise self._lose(Loss((rank,), text))

    def _expect(self, rank: int, frame: tuple[bytes, bytes], wanted: bytes) -> bytes:
        tag, payload = frame
        if tag != wanted:
            raise RuntimeError(f"rank {rank} is out of step with rank 0: it sent {tag!r} instead of {wanted!r}")
        return payload

    def _send_all(self, tag: bytes, payload: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(tag, payload)
            except BlockingIOError:
                text = f"rank {rank} did not read from rank 0 within {self.timeout_s:g} s"
                raise self._lose(Loss((rank,), text)) from None
            except OSError as error:
                link.ended = link.ended or error
                raise self._lose(self._find_loss(rank, link)) from None


class StarSpoke(Star):
    """Any rank but 0 of a star, with a link to rank 0."""

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        # If sending fails, rank 0 is gone, and its last frame may say why: so read in any case.
        with contextlib.suppress(OSError):
            self._links[0].send(_GATHER, payload)
        return unpack(self._expect(_GATHER), "rank 0", self.world_size)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        return self._expect(_BROADCAST)

    def send_command(self, payload: bytes) -> None:
        raise self._refuse("send_command")

    def next_command(self) -> bytes | None:
        self._check_usable()
        frame = self._wait_for_frame(None)
        if frame[0] == _CLOSE:
            self._links[0].inbox.appendleft(frame)  # for the next call
            return None
        if frame[0] != _COMMAND:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {frame[0]!r} instead of a command")
        return frame[1]

    def meet(self, place: str, timeout_s: float) -> bool:
        with contextlib.suppress(OSError):
            self._links[0].send(MEET, place.encode())
        deadline = time.monotonic() + timeout_s + _REPORT_S
        while 0 not in self._news.met.get(place, set()):
            self._listen()
            if self._lost is not None or self._links[0].ended is not None or time.monotonic() > deadline:
                return 0 in self._news.met.pop(place, set())
            wait(self.links(), TICK_S)
        del self._news.met[place]
        return True

    def _expect(self, wanted: bytes) -> bytes:
        tag, payload = self._wait_for_frame(self.timeout_s + _REPORT_S)
        if tag == _CLOSE:
            text = "rank 0 closed the job while this rank still waited for it"
            raise self._lose(Loss((0,), text), JobClosedError)
        if tag != wanted:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {tag!r} instead of {wanted!r}")
        return payload

    def _wait_for_frame(self, timeout_s: float | None) -> tuple[bytes, bytes]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._next_frame(0)) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise self._lose(Loss((0,), f"rank 0 did not answer within {self.timeout_s:g} s"))
            # The kernel alone does not notice that another host is gone while data is on its way there (`Link.pump`).
            tick_s = None if self._links[0].is_unix else _TCP_TICK_S
            wait(self.links(), min((each for each in (left_s, tick_s) if each is not None), default=None))
        return frame
