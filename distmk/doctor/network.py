"""The network between hosts that the host twin and NVSHMEM would use from this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distmk.backends.cuda.network import RDMA_FOLDER, SETTINGS, rdma_ports, remote_transport
from distmk.bootstrap.rendezvous import own_hosts
from distmk.doctor.finding import Finding


def check_network(folder: Path = RDMA_FOLDER) -> Finding:
    """The transport to other hosts on each backend, with every RDMA adapter and the settings in force."""
    ports = rdma_ports(folder)
    gpus = f"GPUs by NVSHMEM's {remote_transport()}" if ports else "GPUs cannot, for lack of InfiniBand or RoCE"
    addresses = ", ".join(own_hosts()[1:]) or "loopback alone"
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return Finding(
        "network", "ok", f"to other hosts: host twin by TCP ({addresses}); {gpus}", None, (*ports, *settings)
    )


CHECKS: dict[str, Callable[[], Finding]] = {"network": check_network}
