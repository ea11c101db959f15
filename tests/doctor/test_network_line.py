"""The doctor's line about the network between hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmk.doctor.network import check_network


def make_port(folder: Path, adapter: str, layer: str) -> None:
    port = folder / adapter / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", layer), ("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)")):
        (port / name).write_text(text + "\n")


def test_without_rdma(tmp_path: Path) -> None:
    finding = check_network(tmp_path)
    assert finding.state == "ok" and "host twin by TCP" in finding.text
    assert "for lack of InfiniBand or RoCE" in finding.text and finding.details == ()


def test_adapters_and_settings_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_port(tmp_path, "mlx5_1", "Ethernet")
    make_port(tmp_path, "mlx5_0", "InfiniBand")
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "mlx5_0:1")
    finding = check_network(tmp_path)
    assert "GPUs by NVSHMEM's ibrc" in finding.text
    first, second, setting = finding.details
    assert first == "mlx5_0 port 1: InfiniBand, ACTIVE, 400 Gb/sec (4X NDR)" and second.startswith(
        "mlx5_1 port 1: Ethernet"
    )
    assert setting == "NVSHMEM_HCA_LIST=mlx5_0:1"
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "1")
    assert "NVSHMEM's ibgda" in check_network(tmp_path).text
