"""Build the star over TCP: a launcher carries rank 0's address and key to the other ranks, which then connect to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distmk.bootstrap.base import Member
from distmk.bootstrap.link import Link, accept_links, join_link
from distmk.bootstrap.star import Launcher, Star, StarHub, StarSpoke
from distmk.errors import RankLostError

# Carries a payload of at most 1 KiB from rank 0 to all ranks: rank 0 gives it, the others give None, all get it.
Introduce = Callable[[bytes | None], bytes]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_HOSTS = 12
_ATTEMPT_S = 10.0  # for each of several addresses but the last
_SIOCGIFADDR = 0x8915


def join_star(
    member: Member, introduce: Introduce, hosts: Sequence[str], timeout_s: float, launcher: Launcher | None = None
) -> Star:
    """Connect this process with the other ranks; collective.

    `introduce` is the launcher's way to reach all ranks once; `hosts` are names or addresses of rank 0's host, the
    likeliest first, used on rank 0 only. Raises RankLostError if a rank is missing after `timeout_s`.
    """
    launcher = launcher or Launcher()
    star: Star
    if member.rank == 0:
        star = _become_hub(member, introduce, hosts, timeout_s, launcher)
    else:
        star = _become_spoke(member, introduce, timeout_s, launcher)
    try:
        _exchange_hosts(star, member)
    except BaseException:
        star.close()
        raise
    return star


def _become_hub(
    member: Member, introduce: Introduce, hosts: Sequence[str], timeout_s: float, launcher: Launcher
) -> StarHub:
    one_host = member.local_size == member.world_size or all(host in _LOOPBACK for host in hosts)
    authkey = secrets.token_hex(32)
    with _listen(one_host, member.world_size) as server:
        reachable_at = ["127.0.0.1"] if one_host else list(hosts[:_MOST_HOSTS])
        address = {"hosts": reachable_at, "port": server.getsockname()[1], "authkey": authkey}
        introduce(json.dumps(address).encode())
        links = accept_links(server, member.world_size, bytes.fromhex(authkey), timeout_s, launcher.check_joining)
    return StarHub(member, links, timeout_s, launcher)


def _listen(one_host: bool, backlog: int) -> socket.socket:
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _become_spoke(member: Member, introduce: Introduce, timeout_s: float, launcher: Launcher) -> StarSpoke:
    address = json.loads(introduce(None))
    link = _reach_hub(member.rank, address["hosts"], address["port"], bytes.fromhex(address["authkey"]), timeout_s)
    return StarSpoke(member, link, timeout_s, launcher)


def _reach_hub(rank: int, hosts: Sequence[str], port: int, authkey: bytes, timeout_s: float) -> Link:
    """Connect under the first of `hosts` that leads to rank 0; whether it does, the handshake shows."""
    deadline = time.monotonic() + timeout_s
    failures = []
    for index, host in enumerate(hosts):
        left_s = max(0.1, deadline - time.monotonic())
        limit_s = left_s if index == len(hosts) - 1 else min(left_s, _ATTEMPT_S)
        try:
            link = join_link(socket.create_connection((host, port), limit_s), rank, authkey, limit_s)
        except (OSError, RankLostError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            failures.append(f"{host} port {port}: {reason or error}")
            continue
        link.set_timeout(timeout_s)
        return link
    raise RankLostError(f"rank {rank} cannot reach rank 0 at {'; nor at '.join(failures)}")


def _exchange_hosts(star: Star, member: Member) -> None:
    """Set the host names, and the local rank and size if the launcher did not give them.

    The launcher's own local rank has precedence, since the launcher may also have chosen the visible GPUs by it.
    """
    hosts = [json.loads(part) for part in star.allgather(json.dumps([socket.gethostname(), _boot_id()]).encode())]
    star.hostnames = [hostname for hostname, _ in hosts]
    same_host = [rank for rank, host in enumerate(hosts) if host == hosts[star.rank]]
    if member.local_rank is None:
        star.local_rank = same_host.index(star.rank)
    if member.local_size is None:
        star.local_size = len(same_host)


def _boot_id() -> str:
    """Tells apart hosts of one name; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_hosts() -> list[str]:
    """This host's name, then the IPv4 addresses of its interfaces except loopback.

    For launchers that give no address of rank 0. The name may not resolve elsewhere, or to a loopback address.
    """
    hosts = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
                if not address.startswith("127."):
                    hosts.append(address)
    return hosts
