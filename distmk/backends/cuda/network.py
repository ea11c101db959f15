"""The network between the GPUs of several hosts: NVSHMEM's remote transports, and the adapters that they need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distmk.errors import UsageError

RDMA_FOLDER = Path("/sys/class/infiniband")
TRANSPORT_ENV = "NVSHMEM_REMOTE_TRANSPORT"
DEFAULT_TRANSPORT = "ibrc"  # InfiniBand verbs and RoCE, driven by a host thread
# NVSHMEM's own settings that choose the network and the adapter.
SETTINGS = (
    TRANSPORT_ENV,
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_HCA_LIST",
    "NVSHMEM_HCA_PE_MAPPING",
    "NVSHMEM_IB_GID_INDEX",
    "NVSHMEM_IB_TRAFFIC_CLASS",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
)


def remote_transport() -> str:
    """The transport that NVSHMEM is asked to use between hosts; `ibgda`: the GPU posts the verbs itself."""
    transport = os.environ.get(TRANSPORT_ENV, DEFAULT_TRANSPORT)
    by_gpu = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() in ("1", "true", "yes")
    return "ibgda" if transport == DEFAULT_TRANSPORT and by_gpu else transport


def rdma_ports(folder: Path = RDMA_FOLDER) -> tuple[str, ...]:
    """A line for each port of an InfiniBand or RoCE adapter: its name, link layer, state and rate."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        layer, state, rate = (_read(port / name) for name in ("link_layer", "state", "rate"))
        ports.append(f"{port.parents[1].name} port {port.name}: {layer}, {state.partition(': ')[2] or state}, {rate}")
    return tuple(ports)


def check_hosts_connected(hostnames: Sequence[str], folder: Path = RDMA_FOLDER) -> None:
    """UsageError if ranks are on several hosts and this one has no adapter for NVSHMEM's own transports.

    NVSHMEM groups ranks by host name, and has no transport over plain TCP.
    """
    if len(set(hostnames)) < 2 or rdma_ports(folder) or TRANSPORT_ENV in os.environ:
        return
    raise UsageError(
        "GPUs of several hosts are connected by InfiniBand or RoCE, and this host has no such adapter; "
        f"run all ranks on one host, use --backend host, or name another transport by {TRANSPORT_ENV}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
