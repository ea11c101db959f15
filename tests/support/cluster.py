"""Runs commands on the hosts of `support.hosts` under every launcher, one job over all of them."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.helpers import Finished, Runner, mpirun_command
from support.hosts import Host


@dataclass
class Job:
    """Commands that run, in the order of hosts and, on each, of ranks."""

    runner: Runner
    processes: list[subprocess.Popen[str]]

    def wait(self) -> list[Finished]:
        """Wait for all of them to end."""
        return [self.runner.finish(process) for process in self.processes]


@dataclass
class Cluster:
    """Hosts, and the runner that starts commands on them."""

    runner: Runner
    hosts: Sequence[Host]
    authkey: str = field(default_factory=lambda: secrets.token_hex(32))

    def start(self, commands: Sequence[tuple[Host, list[str], dict[str, str]]]) -> Job:
        """Start a command with its own environment variables on each host."""
        return Job(self.runner, [self.runner.start(host.command(argv), env) for host, argv, env in commands])

    def left_in_shared_memory(self) -> list[str]:
        """Files of distmk in the hosts' /dev/shm."""
        folders = [Path(f"/proc/{host.holder.pid}/root/dev/shm") for host in self.hosts]
        return [str(path) for folder in folders for path in folder.glob("distmk-*")]

    def variables(self, host: Host) -> dict[str, str]:
        """What every launch on `host` gets: the key of the job, and a folder for temporary files of the host's own."""
        folder = self.runner.folder / host.name
        folder.mkdir(exist_ok=True)
        return {"TMPDIR": str(folder), "DISTMK_AUTHKEY": self.authkey}


MakeCluster = Callable[..., Cluster]  # number of hosts, and keywords of `hosts.make_hosts`
Start = Callable[[Cluster, list[str], int, dict[str, str]], Job]


def torchrun(cluster: Cluster, python_args: list[str], per_host: int, env: dict[str, str], c10d: bool = False) -> Job:
    """launch/torchrun.sh's options on each host; static rendezvous unless `c10d`, where no host is told its number."""
    first = cluster.hosts[0].name
    commands = []
    for index, host in enumerate(cluster.hosts):
        if c10d:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--rdzv-id", "test"]
        else:
            meet = ["--node-rank", str(index), "--master-addr", first, "--master-port", "29500"]
        torch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(cluster.hosts)), *meet]
        argv = [*torch, "--nproc-per-node", str(per_host), *python_args]
        commands.append((host, argv, cluster.variables(host) | env))
    return cluster.start(commands)


def torchrun_c10d(cluster: Cluster, python_args: list[str], per_host: int, env: dict[str, str]) -> Job:
    return torchrun(cluster, python_args, per_host, env, c10d=True)


def mpirun(cluster: Cluster, python_args: list[str], per_host: int, env: dict[str, str]) -> Job:
    """mpirun on the first host; the agent that takes the place of ssh enters the namespaces of the others."""
    agent = cluster.runner.folder / "agent.sh"
    entries = "\n".join(f'{host.name}) exec {" ".join(host.command(["sh", "-c"]))} "$*" ;;' for host in cluster.hosts)
    agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{entries}\nesac\nexit 1\n")
    agent.chmod(0o755)
    slots = ",".join(f"{host.name}:{per_host}" for host in cluster.hosts)
    pass_on = [word for name in ("PYTHONPATH", "TEST_TOKEN", *env) for word in ("-x", name)]
    options = ["--prtemca", "plm_ssh_agent", str(agent), "--host", slots, "-n", str(per_host * len(cluster.hosts))]
    argv = [*mpirun_command(), *options, *pass_on, sys.executable, *python_args]
    return cluster.start([(cluster.hosts[0], argv, env)])


def srun(cluster: Cluster, python_args: list[str], per_host: int, env: dict[str, str]) -> Job:
    """The variables that srun gives each rank; there is no MPI."""
    job = {
        "SLURM_JOB_ID": str(secrets.randbelow(100_000)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(per_host * len(cluster.hosts)),
        "SLURM_STEP_NODELIST": ",".join(host.name for host in cluster.hosts),
    }
    commands = []
    for index, host in enumerate(cluster.hosts):
        for local in range(per_host):
            own = {"SLURM_PROCID": str(index * per_host + local), "SLURM_LOCALID": str(local)}
            commands.append((host, [sys.executable, *python_args], cluster.variables(host) | job | own | env))
    return cluster.start(commands)


LAUNCHERS: dict[str, Start] = {"mpirun": mpirun, "torchrun": torchrun, "c10d": torchrun_c10d, "srun": srun}


def distmk(*arguments: str) -> list[str]:
    """Arguments of Python for `python -m distmk`."""
    return ["-m", "distmk", *arguments]
