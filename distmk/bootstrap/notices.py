"""Notices between ranks outside of collective calls: a loss, a launch that is given up, a meeting place that is reached.

These frames are taken out of the stream whenever a connection is read, so they never disturb a collective call.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field

from distmk.bootstrap.base import name_ranks
from distmk.bootstrap.messages import from_json, to_json
from distmk.errors import DistmkError

# Frame tags.
LOST = b"x"  # ranks are lost; the payload says which, and why
ABORT = b"a"  # a launch is given up
MEET = b"m"  # a rank has reached a meeting place; from rank 0: all ranks have
ASK = b"?"  # rank 0 asks whether a rank is alive
ANSWER = b"!"  # the rank is alive

# A connection that ended with one of these errors was not closed: the other host, or the network to it, does not
# answer.
UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


@dataclass(frozen=True)
class Loss:
    """Ranks that are gone, and a line that says so."""

    ranks: tuple[int, ...]
    text: str

    def encode(self) -> bytes:
        return to_json({"ranks": self.ranks, "text": self.text})

    @staticmethod
    def decode(payload: bytes, sender: str) -> Loss:
        """Undo `encode`. DistmkError: `payload` is something else."""
        value = from_json(payload, sender, "report of a loss", {"ranks": [int], "text": str})
        return Loss(tuple(value["ranks"]), value["text"])


@dataclass
class Notices:
    """The notices that this rank has received so far."""

    loss: Loss | None = None
    aborts: dict[int, int] = field(default_factory=dict)  # reason, by the number of the launch
    met: dict[str, set[int]] = field(default_factory=dict)  # by name of the meeting place: ranks that have reached it
    answered: set[int] = field(default_factory=set)  # ranks that have answered since rank 0 asked

    def take(self, tag: bytes, payload: bytes, rank: int) -> bool:
        """Take in a frame of `rank`. False: the frame belongs to a collective call. DistmkError: it is malformed."""
        sender = f"rank {rank}"
        if tag == LOST:
            self.loss = self.loss or Loss.decode(payload, sender)
        elif tag == ABORT:
            launch, reason = decode_abort(payload, sender)
            self.aborts.setdefault(launch, reason)
        elif tag == MEET:
            self.met.setdefault(payload.decode(errors="replace"), set()).add(rank)
        elif tag == ANSWER:
            self.answered.add(rank)
        else:
            return False
        return True


def encode_abort(launch: int, reason: int) -> bytes:
    return to_json({"launch": launch, "reason": reason})


def decode_abort(payload: bytes, sender: str) -> tuple[int, int]:
    """The launch that is given up, and the reason. DistmkError: `payload` is something else."""
    value = from_json(payload, sender, "abort of a launch", {"launch": int, "reason": int})
    return value["launch"], value["reason"]


def is_unreachable(error: BaseException) -> bool:
    """Whether a connection ended because the other side does not answer, and not because it was closed."""
    return isinstance(error, OSError) and error.errno in UNREACHABLE


def is_malformed(error: BaseException | None) -> bool:
    """Whether a connection ended because the other side sent something malformed."""
    return isinstance(error, DistmkError) or (isinstance(error, OSError) and error.errno == errno.EMSGSIZE)


def lost_host(rank: int, hosts: Sequence[str], hostnames: Sequence[str], link_timeout_s: float) -> Loss:
    """The loss of all ranks on the host of `rank`. `hosts`: an identity of each rank's host."""
    ranks = tuple(other for other, host in enumerate(hosts) if host == hosts[rank]) if hosts else (rank,)
    place = f" on {hostnames[rank]}" if hostnames else ""
    was = "was" if len(ranks) == 1 else "were"
    return Loss(ranks, f"{name_ranks(ranks)}{place} {was} lost: no answer over the network for {link_timeout_s:g} s")
