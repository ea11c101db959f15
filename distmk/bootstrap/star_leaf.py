"""A rank of a star other than 0: everything that it sends and gets passes through rank 0."""

from __future__ import annotations

import contextlib
import time

from distmk.bootstrap.link import TICK_S, wait
from distmk.bootstrap.messages import unpack
from distmk.bootstrap.notices import ANSWER, ASK, MEET, Loss
from distmk.bootstrap.star import BROADCAST, CLOSE, COMMAND, GATHER, Star
from distmk.errors import JobClosedError

# Other ranks wait a little longer than rank 0, whose report names the missing rank.
_REPORT_S = 5.0
_TCP_TICK_S = 1.0


class StarLeaf(Star):
    """Any rank of a star except 0, with a link to rank 0."""

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        # If sending fails, rank 0 is gone, and its last frame may say why. So read in any case.
        with contextlib.suppress(OSError):
            self._links[0].send(GATHER, payload)
        return unpack(self._expect(GATHER), "rank 0", self.world_size)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        return self._expect(BROADCAST)

    def send_command(self, payload: bytes) -> None:
        raise self._refuse("send_command")

    def next_command(self) -> bytes | None:
        self._check_usable()
        frame = self._wait_for_frame(None)
        if frame[0] == CLOSE:
            self._links[0].inbox.appendleft(frame)  # for the next call
            return None
        if frame[0] != COMMAND:
            raise RuntimeError(f"rank {self.rank} is out of step with rank 0: it got {frame[0]!r} instead of a command")
        return frame[1]

    def meet(self, place: str, timeout_s: float) -> bool:
        with contextlib.suppress(OSError):
            self._links[0].send(MEET, place.encode())
        deadline = time.monotonic() + timeout_s + _REPORT_S
        while 0 not in self._notices.met.get(place, set()):
            self._listen()
            if self._lost is not None or self._links[0].ended is not None or time.monotonic() > deadline:
                return 0 in self._notices.met.pop(place, set())
            wait(self.links(), TICK_S)
        del self._notices.met[place]
        return True

    def _take(self, rank: int, tag: bytes, payload: bytes) -> bool:
        if tag != ASK:
            return super()._take(rank, tag, payload)
        with contextlib.suppress(OSError):
            self._links[0].post(ANSWER, b"")
        return True

    def _expect(self, wanted: bytes) -> bytes:
        tag, payload = self._wait_for_frame(self.timeout_s + _REPORT_S)
        if tag == CLOSE:
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
