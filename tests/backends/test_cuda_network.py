"""GPUs of several hosts: refused in one line where no adapter connects them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmk.backends.cuda.network import TRANSPORT_ENV, check_hosts_connected, rdma_ports
from distmk.errors import UsageError


def test_hosts_without_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRANSPORT_ENV, raising=False)
    check_hosts_connected(["a", "a"], tmp_path)
    with pytest.raises(UsageError, match="InfiniBand or RoCE"):
        check_hosts_connected(["a", "b"], tmp_path)
    monkeypatch.setenv(TRANSPORT_ENV, "libfabric")
    check_hosts_connected(["a", "b"], tmp_path)
    monkeypatch.delenv(TRANSPORT_ENV)
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    check_hosts_connected(["a", "b"], tmp_path)
    assert rdma_ports(tmp_path) == ("mlx5_0 port 1: unknown, unknown, unknown",)
