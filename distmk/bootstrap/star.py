"""The transport between ranks: a star of stream sockets with rank 0 at its centre, whatever the launcher."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from functools import partial

from distmk.bootstrap.base import Bootstrap, Launcher, Member, name_ranks
from distmk.bootstrap.link import Link, wait
from distmk.bootstrap.messages import malformed
from distmk.bootstrap.notices import ABORT, LOST, Loss, Notices, encode_abort, is_malformed, is_unreachable, lost_host
from distmk.errors import RankLostError

# Frame tags of collective calls.
GATHER = b"g"
BROADCAST = b"b"
COMMAND = b"c"
CLOSE = b"q"  # rank 0 closes

_TOGETHER_S = 0.3  # connections of processes that die together end within this time
LEAVING = "closing"  # the meeting place of ranks that close in order


class Star(Bootstrap):
    """The common part of rank 0 and the other ranks.

    Takes over `links`, by rank, and the `authkey` with which they were made.
    """

    def __init__(
        self, member: Member, links: Mapping[int, Link], authkey: bytes, timeout_s: float, launcher: Launcher
    ) -> None:
        super().__init__(member, timeout_s)
        self.authkey = authkey
        self._links = dict(sorted(links.items()))
        self._launcher = launcher
        self._notices = Notices()
        self._owner_pid = os.getpid()

    def close(self) -> None:
        # A forked child shares the sockets, but its exit must not end its parent's job.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._announce_close()
        in_order = self._lost is None
        if in_order and self._launcher.leaves_together:
            in_order = self.meet(LEAVING, self.timeout_s)
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
        if self._notices.loss is None:
            return [rank for rank, link in self._links.items() if link.ended is not None]  # closed in order
        return list(self._notices.loss.ranks)

    @property
    def loss(self) -> str | None:
        return self._notices.loss.text if self._notices.loss else None

    def send_abort(self, launch: int, reason: int) -> None:
        self._notices.aborts.setdefault(launch, reason)
        self._tell(ABORT, encode_abort(launch, reason))

    def abort_reason(self, launch: int) -> int:
        self._listen()
        for past in [each for each in self._notices.aborts if each < launch]:
            del self._notices.aborts[past]
        return self._notices.aborts.get(launch, 0)

    def _announce_close(self) -> None:
        """Tell the other ranks that this one closes, without waiting for them."""

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    def _tell(self, tag: bytes, payload: bytes, but: int | None = None) -> None:
        """Send a frame to all ranks at the other ends except `but`, without waiting. The rest of a frame follows later."""
        for rank, link in self._links.items():
            if rank != but and link.ended is None:
                with contextlib.suppress(OSError):
                    link.post(tag, payload)

    def _listen(self) -> None:
        """Read everything that has arrived, without waiting, and record a loss."""
        if self._closed or self._lost is not None:
            return
        for rank, link in self._links.items():
            if link.ended is None:
                self._pump(rank, link)
        if self._notices.loss is not None:
            self._lose(self._notices.loss)

    def _pump(self, rank: int, link: Link) -> None:
        """Take in the frames of `rank` that have arrived, up to the end of the connection, which counts as a loss."""
        known = set(self._notices.aborts)
        link.pump(partial(self._take, rank))
        if self.rank == 0:
            for launch in self._notices.aborts.keys() - known:
                self._tell(ABORT, encode_abort(launch, self._notices.aborts[launch]), but=rank)
        in_order = any(tag == CLOSE for tag, _ in link.inbox)
        if link.ended is not None and not in_order and self._notices.loss is None:
            self._notices.loss = self._find_loss(rank, link)

    def _take(self, rank: int, tag: bytes, payload: bytes) -> bool:
        return self._notices.take(tag, payload, rank)

    def _find_loss(self, rank: int, link: Link) -> Loss:
        """The loss behind the end of a connection: of a host, or of all processes that ended together with this one."""
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
        """Record the loss and, on rank 0, report it to the other ranks."""
        self._notices.loss = self._notices.loss or loss
        self._lost = kind(self._notices.loss.text)
        if self.rank == 0:
            self._tell(LOST, self._notices.loss.encode())
        return kind(self._notices.loss.text)

    def _next_frame(self, rank: int) -> tuple[bytes, bytes] | None:
        """The next frame of a collective call from `rank`, if it has arrived. RankLostError: a rank is gone."""
        link = self._links[rank]
        if not link.inbox and link.ended is None:
            self._pump(rank, link)
        # Rank 0 reports a loss before it closes because of it.
        if link.inbox and not (self._notices.loss and link.inbox[0][0] == CLOSE):
            return link.inbox.popleft()
        if self._notices.loss is not None:
            raise self._lose(self._notices.loss)
        return None
