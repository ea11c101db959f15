"""A model on several hosts gives, bit for bit, what the same ranks give on one host with the same virtual nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.cluster import LAUNCHERS, Cluster, MakeCluster
from support.helpers import Runner

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).with_name("tokens_job.py")
PATHS = {"PYTHONPATH": f"{SCRIPT.parents[1]}:{SCRIPT.parents[2]}"}


def on_one_host(runner: Runner, model: Path, num_ranks: int, node_size: int) -> dict[str, Any]:
    result = runner.folder / "one_host.json"
    command = [sys.executable, str(SCRIPT), str(model), str(result), str(num_ranks)]
    finished = runner.run(command, PATHS | {"DISTMK_VIRTUAL_NODE_SIZE": str(node_size)})
    assert finished.status == 0, finished.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def on_hosts(cluster: Cluster, launcher: str, model: Path, per_host: int) -> dict[str, Any]:
    result = cluster.runner.folder / f"{launcher}.json"
    finished = LAUNCHERS[launcher](cluster, [str(SCRIPT), str(model), str(result)], per_host, PATHS).wait()
    assert all(each.status == 0 for each in finished), finished
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture
def wide_model(tmp_path: Path) -> Path:
    """Layers as wide as those of SmolLM2-135M, whose nine heads three ranks share, with few other weights to load."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "num_hidden_layers": 4}
    model = tiny.make("llama", seed=2, num_attention_heads=9, num_key_value_heads=3, **sizes)
    return tiny.save(model, tmp_path / "wide_model")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("model", "num_hosts", "per_host", "launchers"),
    [("tiny_model", 2, 2, ["mpirun"]), ("wide_model", 3, 1, ["c10d"])],
)
def test_tokens_of_several_hosts(
    model: str,
    num_hosts: int,
    per_host: int,
    launchers: list[str],
    make_cluster: MakeCluster,
    runner: Runner,
    request: pytest.FixtureRequest,
) -> None:
    """Tokens, and the logits behind the first prompt."""
    path: Path = request.getfixturevalue(model)
    expected = on_one_host(runner, path, num_hosts * per_host, per_host)
    assert all(len(tokens) == 12 for tokens in expected["tokens"])
    cluster = make_cluster(num_hosts)
    for launcher in launchers:
        assert on_hosts(cluster, launcher, path, per_host) == expected, launcher


def test_slow_and_lossy_link(make_cluster: MakeCluster, tiny_model: Path, runner: Runner) -> None:
    """2 ms and a loss of 3 % each way: slower, and as right."""
    expected = on_one_host(runner, tiny_model, 2, 1)
    cluster = make_cluster(2, delay_ms=2, loss=0.03)
    assert on_hosts(cluster, "srun", tiny_model, 1) == expected
