"""The network between hosts: what the host twin and NVSHMEM would use from this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distmk.bootstrap.rendezvous import own_hosts
from distmk.doctor.finding import Finding

RDMA_FOLDER = Path("/sys/class/infiniband")
DEFAULT_TRANSPORT = "ibrc"  # of NVSHMEM 3: InfiniBand verbs and RoCE, driven by a thread of the host
# Settings of NVSHMEM that choose the network and the adapter; all are NVSHMEM's own.
SETTINGS = (
    "NVSHMEM_REMOTE_TRANSPORT",
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_HCA_LIST",
    "NVSHMEM_HCA_PE_MAPPING",
    "NVSHMEM_IB_GID_INDEX",
    "NVSHMEM_IB_TRAFFIC_CLASS",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
)


def check_network(folder: Path = RDMA_FOLDER) -> Finding:
    """The transport to other hosts on each backend, with every RDMA adapter and the settings in force."""
    adapters = _adapters(folder)
    transport = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", DEFAULT_TRANSPORT)
    if transport == DEFAULT_TRANSPORT and os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() in (
        "1",
        "true",
        "yes",
    ):
        transport = "ibgda"
    gpus = f"GPUs by NVSHMEM's {transport}" if adapters else "GPUs cannot, for lack of InfiniBand or RoCE"
    addresses = ", ".join(own_hosts()[1:]) or "loopback alone"
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return Finding(
        "network", "ok", f"to other hosts: host twin by TCP ({addresses}); {gpus}", None, (*adapters, *settings)
    )


def _adapters(folder: Path) -> list[str]:
    """A line for each port of an RDMA adapter: its name, link layer, state and rate."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        layer, state, rate = (_read(port / name) for name in ("link_layer", "state", "rate"))
        found.append(f"{port.parents[1].name} port {port.name}: {layer}, {state.partition(': ')[2] or state}, {rate}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


CHECKS: dict[str, Callable[[], Finding]] = {"network": check_network}
