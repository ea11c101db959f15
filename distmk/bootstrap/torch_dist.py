"""Ranks started by torchrun, or by anything else that sets its variables.

Only torch's key-value store is used, to publish where rank 0 listens; the ranks then talk in a star over TCP. So no
process group is made, and those of the user's program stay as they are.
"""

from __future__ import annotations

import datetime
import itertools
import json
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmk.bootstrap.base import LaunchKind
from distmk.bootstrap.star import StarHub, StarSpoke, accept_links, join_link
from distmk.errors import RankLostError, UsageError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_STEP_S = 1.0

# Stores are kept until the process ends: a later job of the same process meets the same one under a new prefix.
_stores: dict[tuple[str, int], Any] = {}
_generations = itertools.count()


@dataclass(frozen=True)
class TorchPlace:
    """A rank's place in a job as torchrun's variables tell it; the local ones may be unknown."""

    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str
    master_port: int
    agent_hosts_store: bool = False
    attempt: str = "0"


def connect_torch(kind: LaunchKind, place: TorchPlace, timeout_s: float) -> StarHub | StarSpoke:
    """Join the job. Raises UsageError if torch is missing or the store cannot be opened, RankLostError if a rank is."""
    store = _open_store(place, timeout_s)
    joined: StarHub | StarSpoke
    if place.rank == 0:
        joined = _become_hub(kind, store, place, timeout_s)
    else:
        joined = _become_spoke(kind, store, place, timeout_s)
    try:
        _learn_hosts(joined, place)
    except BaseException:
        joined.close()
        raise
    return joined


def _open_store(place: TorchPlace, timeout_s: float) -> Any:
    try:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            "this process was started as one of several ranks, but PyTorch with torch.distributed is not installed"
        ) from error
    address = (place.master_addr, place.master_port)
    if address not in _stores:
        try:
            _stores[address] = TCPStore(
                place.master_addr,
                place.master_port,
                is_master=place.rank == 0 and not place.agent_hosts_store,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"rank {place.rank} cannot open the store at MASTER_ADDR {place.master_addr} "
                f"MASTER_PORT {place.master_port}: {first_line}"
            ) from error
    return PrefixStore(f"distmk/{place.attempt}/{next(_generations)}", _stores[address])


def _become_hub(kind: LaunchKind, store: Any, place: TorchPlace, timeout_s: float) -> StarHub:
    authkey = secrets.token_hex(32)
    one_host = place.local_size == place.world_size or place.master_addr in _LOOPBACK
    with _listen(one_host, place.world_size) as server:
        port = server.getsockname()[1]
        host = "127.0.0.1" if one_host else place.master_addr
        store.set("hub", json.dumps({"host": host, "port": port, "authkey": authkey}))
        links = accept_links(server, place.world_size, bytes.fromhex(authkey), timeout_s, lambda: None)
    return StarHub(kind, links, timeout_s)


def _listen(one_host: bool, backlog: int) -> socket.socket:
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _become_spoke(kind: LaunchKind, store: Any, place: TorchPlace, timeout_s: float) -> StarSpoke:
    hub = json.loads(_wait_for(store, "hub", timeout_s))
    try:
        sock = socket.create_connection((hub["host"], hub["port"]), timeout=timeout_s)
    except OSError as error:
        raise RankLostError(
            f"rank {place.rank} cannot reach rank 0 at {hub['host']} port {hub['port']}: {error.strerror or error}"
        ) from error
    link = join_link(sock, place.rank, bytes.fromhex(hub["authkey"]), timeout_s)
    return StarSpoke(kind, link, place.rank, place.world_size, timeout_s)


def _wait_for(store: Any, key: str, timeout_s: float) -> bytes:
    """Wait in short steps, since Ctrl-C is not seen while the store waits."""
    deadline = time.monotonic() + timeout_s
    step = datetime.timedelta(seconds=_STEP_S)
    while True:
        try:
            store.wait([key], step)
            return bytes(store.get(key))
        except RuntimeError as error:
            # A wait that merely ran out of its step takes that long; a broken store answers at once.
            if time.monotonic() > deadline:
                raise RankLostError(f"rank 0 did not come up within {timeout_s:g} s") from error
            if "timeout" not in str(error).lower():
                raise RankLostError("rank 0, or the store of the launcher, is gone") from error


def _learn_hosts(joined: StarHub | StarSpoke, place: TorchPlace) -> None:
    """Find out who shares a host; the launcher's own local rank wins, since it decides which devices are seen."""
    hostname = socket.gethostname()
    parts = [json.loads(part) for part in joined.allgather(json.dumps([hostname, _boot_id()]).encode())]
    joined.hostnames = [name for name, _ in parts]
    mine = [rank for rank, part in enumerate(parts) if part == parts[joined.rank]]
    joined.local_rank = mine.index(joined.rank) if place.local_rank is None else place.local_rank
    joined.local_size = len(mine) if place.local_size is None else place.local_size


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
