"""Rank 0 of a star: it collects and distributes what the other ranks send, and names a rank that does not answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from distmk.bootstrap.base import SILENCE_S, name_ranks
from distmk.bootstrap.link import TICK_S, wait
from distmk.bootstrap.messages import pack, unpack
from distmk.bootstrap.notices import ASK, MEET, Loss
from distmk.bootstrap.star import BROADCAST, CLOSE, COMMAND, GATHER, LEAVING, Star
from distmk.interrupts import check_patience

_ASK_S = 1.0  # between two questions to the other ranks
_STOPPED_S = 2.0  # after so much silence, the launcher is asked whether the process is stopped


class StarRoot(Star):
    """Rank 0 of a star, with a link to each other rank."""

    _asked_s = -math.inf
    _silent_s: Mapping[int, float] = MappingProxyType({})  # how long each rank has not answered

    def allgather(self, payload: bytes) -> list[bytes]:
        self._check_usable()
        parts = {0: payload} | self._collect(GATHER)
        packed = pack([parts[rank] for rank in range(self.world_size)])
        self._send_all(GATHER, packed)
        return unpack(packed, "rank 0", self.world_size)

    def broadcast(self, payload: bytes | None = None) -> bytes:
        self._check_usable()
        if payload is None:
            raise RuntimeError("rank 0 must give the payload of a broadcast")
        self._send_all(BROADCAST, payload)
        return payload

    def send_command(self, payload: bytes) -> None:
        self._check_usable()
        self._send_all(COMMAND, payload)

    def next_command(self) -> bytes | None:
        raise self._refuse("next_command")

    def meet(self, place: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        met = self._notices.met.setdefault(place, set())
        while not met >= set(self._links):
            self._listen()
            if self._lost is not None or time.monotonic() > deadline:
                return False
            wait(self.links(), TICK_S)
        del self._notices.met[place]
        self._tell(MEET, place.encode())
        return True

    def silence(self) -> str | None:
        self._listen()
        if self.loss is not None:
            return self.loss
        now_s = time.monotonic()
        past_s = now_s - self._asked_s
        if past_s < _ASK_S:
            return None
        # After a longer time this process itself was stopped or busy, and the others have not been asked.
        counts_s = past_s if past_s < 2 * _ASK_S else -math.inf
        late = [rank for rank in self._links if rank not in self._notices.answered]
        self._silent_s = {rank: max(0.0, self._silent_s.get(rank, 0.0) + counts_s) for rank in late}
        self._notices.answered.clear()
        self._asked_s = now_s
        self._tell(ASK, b"")
        return next(filter(None, map(self._describe_silence, self._silent_s)), None)

    def _describe_silence(self, rank: int) -> str | None:
        silent_s = self._silent_s[rank]
        if silent_s >= _STOPPED_S and (text := self._launcher.describe_stop(rank)):
            return text
        return f"rank {rank} has not answered for {silent_s:.0f} s; is it stopped?" if silent_s >= SILENCE_S else None

    def _announce_close(self) -> None:
        self._tell(CLOSE, b"")

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
            if leaving := sorted(self._notices.met.get(LEAVING, set()) & set(pending)):
                raise self._lose(Loss(tuple(leaving), f"rank {leaving[0]} left the job"))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = f"{name_ranks(pending)} did not answer rank 0 within {self.timeout_s:g} s"
                raise self._lose(Loss(tuple(pending), text))
            if not wait([self._links[rank] for rank in pending], min(left_s, TICK_S)):
                self._check_processes()
                check_patience()

    def _check_processes(self) -> None:
        """Raise RankLostError if the launcher knows that a rank has ended, or is stopped where that counts, and all its
        data is read.
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
