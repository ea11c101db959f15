"""Ranks started by Slurm's `srun`: MPI or torch's key-value store introduces them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from distmk.bootstrap.base import Member
from distmk.bootstrap.mpi import connect_mpi, mpi_world_size
from distmk.bootstrap.star import Star
from distmk.bootstrap.torchrun import StoreAddress, connect_store
from distmk.env import whole
from distmk.errors import UsageError, shown

# Ports 12000 to 31999 are below the range that Linux assigns on its own (32768 and up).
_FIRST_PORT = 12000
_PORTS = 20000
_SCONTROL_TIMEOUT_S = 10.0
_MOST_HOSTS = 100_000
_MOST_DIGITS = 18  # limit for a number in the environment


def connect_slurm(member: Member, env: Mapping[str, str], timeout_s: float) -> Star:
    """Join the ranks of an `srun` step. MPI introduces them if srun offers PMI and mpi4py uses it, else torch's store.

    Raises UsageError if rank 0 cannot be reached in either way, RankLostError if a rank does not join.
    """
    has_pmi = any(name in env for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD"))
    if has_pmi and importlib.util.find_spec("mpi4py") is not None and mpi_world_size() == member.world_size:
        return connect_mpi("slurm", member.world_size, member.local_rank, member.local_size, timeout_s)
    member = replace(member, several_hosts=env.get("SLURM_STEP_NUM_NODES", "1") != "1")
    return connect_store(member, StoreAddress(master_addr(env), master_port(env)), timeout_s)


def master_addr(env: Mapping[str, str]) -> str:
    """The host of rank 0: MASTER_ADDR if set, else the first host of the step. Raises UsageError if unknown."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return _hostnames(env[name])[0]
    raise UsageError("srun started this process, but SLURM_JOB_NODELIST is not set; set MASTER_ADDR to rank 0's host")


def master_port(env: Mapping[str, str]) -> int:
    """The port of rank 0's store: MASTER_PORT if set, else one computed from job and step id. Raises UsageError."""
    text = env.get("MASTER_PORT")
    if text:
        port = whole(text)
        if port is None or not 0 < port < 65536:
            raise UsageError(f"MASTER_PORT must be a port number, got {shown(text)}")
        return port
    digits = [re.sub("[^0-9]", "", env.get(name, ""))[:_MOST_DIGITS] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text or 0) for text in digits)
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def _hostnames(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list, expanded by scontrol if it is installed, else here."""
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        try:
            done = subprocess.run(
                [scontrol, "show", "hostnames", nodelist],
                capture_output=True,
                text=True,
                timeout=_SCONTROL_TIMEOUT_S,
                check=True,
            )
            if done.stdout.split():
                return done.stdout.split()
        except (OSError, subprocess.SubprocessError):
            pass
    return expand_nodelist(nodelist)


def expand_nodelist(nodelist: str) -> list[str]:
    """Expand a Slurm node list such as `gpu[03-06,9],login1` to host names. Raises UsageError if it is malformed."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not items or ",".join(items) != nodelist:
        raise UsageError(f"cannot read the Slurm node list {shown(nodelist)}")
    return [host for item in items for host in _expand_item(item, nodelist)]


def _expand_item(item: str, nodelist: str) -> list[str]:
    hosts = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        parts = [literal] if literal else _expand_ranges(ranges, nodelist)
        if len(hosts) * len(parts) > _MOST_HOSTS:
            raise UsageError(f"the Slurm node list {shown(nodelist)} names too many hosts")
        hosts = [host + part for host in hosts for part in parts]
    return hosts


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:-([0-9]{{1,{_MOST_DIGITS}}}))?", part)
        if match is None:
            raise UsageError(f"cannot read {shown(part)} in the Slurm node list {shown(nodelist)}")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise UsageError(f"cannot read {shown(part)} in the Slurm node list {shown(nodelist)}")
        # All numbers of a range have the width of the first, with leading zeros: 08-10 is 08, 09, 10.
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
