"""Ranks started by Slurm's `srun`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping

from distmk.bootstrap.base import Bootstrap
from distmk.bootstrap.mpi import MpiBootstrap, mpi_world_size
from distmk.bootstrap.torch_dist import TorchPlace, connect_torch
from distmk.errors import UsageError

# Below the range from which Linux hands out ports on its own (32768 and up).
_FIRST_PORT = 12000
_PORTS = 20000
_SCONTROL_TIMEOUT_S = 10.0
_MOST_HOSTS = 100_000


def connect_slurm(
    rank: int, world_size: int, local_rank: int | None, env: Mapping[str, str], timeout_s: float
) -> Bootstrap:
    """Join the ranks of an `srun` step: by MPI if srun speaks PMI and mpi4py does too, else over TCP.

    Raises UsageError if no way leads to rank 0, RankLostError if a rank is missing.
    """
    has_pmi = any(name in env for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD"))
    if has_pmi and importlib.util.find_spec("mpi4py") is not None and mpi_world_size() == world_size:
        return MpiBootstrap("slurm", world_size, timeout_s)
    place = TorchPlace(rank, world_size, local_rank, None, master_addr(env), master_port(env))
    return connect_torch("slurm", place, timeout_s)


def master_addr(env: Mapping[str, str]) -> str:
    """The host of rank 0: MASTER_ADDR if set, else the first host of the step. Raises UsageError if unknown."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return _hostnames(env[name])[0]
    raise UsageError("srun started this process, but SLURM_JOB_NODELIST is not set; set MASTER_ADDR to rank 0's host")


def master_port(env: Mapping[str, str]) -> int:
    """The port of rank 0's store: MASTER_PORT if set, else one that job and step id give. Raises UsageError."""
    text = env.get("MASTER_PORT")
    if text:
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise UsageError(f"MASTER_PORT must be a port number, got {text!r}")
        return int(text)
    digits = [re.sub(r"\D", "", env.get(name, "")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text or 0) for text in digits)
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def _hostnames(nodelist: str) -> list[str]:
    """Ask Slurm itself where it can be asked, and expand the list here where not."""
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
    """Expand Slurm's short form of host names, as in `gpu[03-06,9],login1`. Raises UsageError if it is malformed."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not items or ",".join(items) != nodelist:
        raise UsageError(f"cannot read the Slurm node list {nodelist!r}")
    return [host for item in items for host in _expand_item(item, nodelist)]


def _expand_item(item: str, nodelist: str) -> list[str]:
    hosts = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        parts = [literal] if literal else _expand_ranges(ranges, nodelist)
        if len(hosts) * len(parts) > _MOST_HOSTS:
            raise UsageError(f"the Slurm node list {nodelist!r} names too many hosts")
        hosts = [host + part for host in hosts for part in parts]
    return hosts


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise UsageError(f"cannot read {part!r} in the Slurm node list {nodelist!r}")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise UsageError(f"cannot read {part!r} in the Slurm node list {nodelist!r}")
        # The width of the first number, leading zeros included, holds for the range: 08-10 is 08, 09, 10.
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
