"""Ranks started by torchrun, or by anything else that sets its variables: torch's key-value store introduces them.

No process group is made, so those of the user's program stay unchanged.
"""

from __future__ import annotations

import datetime
import itertools
import os
import time
from dataclasses import dataclass
from typing import Any

from distmk.bootstrap.base import Member
from distmk.bootstrap.keys import check_key
from distmk.bootstrap.rendezvous import Introducer, join_star
from distmk.bootstrap.star import Star
from distmk.errors import RankLostError, UsageError

_WAIT_S = 1.0
_KEY = "hub"
_MOST_BYTES = 4096

# Stores stay open until the process ends: a later job of the same process uses the same store under a new prefix.
_stores: dict[tuple[str, int], Any] = {}
_generations = itertools.count()


@dataclass(frozen=True)
class StoreAddress:
    """The place of torch's store. `host` is rank 0's; `attempt` distinguishes restarts by torchrun."""

    host: str
    port: int
    hosted_by_agent: bool = False  # torchrun runs the store, not rank 0
    attempt: str = "0"


def connect_store(member: Member, address: StoreAddress, timeout_s: float) -> Star:
    """Join the ranks that meet at torch's store; collective.

    Raises UsageError if torch is missing or the store cannot be opened, RankLostError if a rank does not join.
    """
    # On every rank, before any depends on the store, which may belong to rank 0 and end with it.
    check_key(member, False, [address.host], os.environ)
    store = _open_store(member.rank, address, timeout_s)

    def carry(payload: bytes | None) -> bytes:
        if payload is None:
            return _wait_for(store, timeout_s)
        store.set(_KEY, payload.decode())
        return payload

    # Every process that reaches the store can read and write it.
    return join_star(member, Introducer(carry, is_private=False), [address.host], timeout_s)


def _open_store(rank: int, address: StoreAddress, timeout_s: float) -> Any:
    try:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            "this process was started as one of several ranks, but PyTorch with torch.distributed is not installed"
        ) from error
    key = (address.host, address.port)
    if key not in _stores:
        try:
            _stores[key] = TCPStore(
                address.host,
                address.port,
                is_master=rank == 0 and not address.hosted_by_agent,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"rank {rank} cannot open the store at MASTER_ADDR {address.host} "
                f"MASTER_PORT {address.port}: {first_line}"
            ) from error
    return PrefixStore(f"distmk/{address.attempt}/{next(_generations)}", _stores[key])


def _wait_for(store: Any, timeout_s: float) -> bytes:
    """Rank 0's payload. Waits in short steps, because Python does not handle Ctrl-C while the store waits."""
    deadline = time.monotonic() + timeout_s
    step = datetime.timedelta(seconds=_WAIT_S)
    while True:
        try:
            store.wait([_KEY], step)
            return bytes(store.get(_KEY))[:_MOST_BYTES]
        except RuntimeError as error:
            # If only the step's time has run out, the text says "timeout"; a broken store fails at once, with another
            # text.
            if time.monotonic() > deadline:
                raise RankLostError(f"rank 0 did not come up within {timeout_s:g} s") from error
            if "timeout" not in str(error).lower():
                raise RankLostError("rank 0, or the store of the launcher, is gone") from error
