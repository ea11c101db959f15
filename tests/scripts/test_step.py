"""`scripts/bench.py step` on the host twin: a run with its peers, its report and plot, and messages for mistakes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from benchmark.ours import Timed
from benchmark.report import Report, Row
from benchmark.step import Comparison
from benchmark.weights import Weights, read_weights
from benchmark.work import Work, hf_config, part_of
from support.helpers import ROOT, Finished, Runner, under_mpirun
from support.tiny_config import tiny_config

from distmk.bootstrap import connect
from distmk.errors import UsageError
from distmk.model.presets import PRESETS
from distmk.model.shards import shard_model
from distmk.models import config_from_hf
from distmk.weights.dummy import DummyCheckpoint

SHORT = ("--backend", "host", "--context", "20", "--tokens", "12", "--repeats", "2")
BENCH = [sys.executable, str(ROOT / "scripts" / "bench.py")]
SMALL = tiny_config("qwen3-8b", hidden_size=48, intermediate_size=75, num_layers=3, num_kv_heads=2, head_dim=8)


@pytest.fixture
def config(runner: Runner) -> Path:
    path = runner.folder / "config.json"
    path.write_text(json.dumps(hf_config(SMALL)))
    return path


def step(runner: Runner, *arguments: str, num_ranks: int = 1) -> Finished:
    command = [*BENCH, "step", *arguments]
    return runner.run(under_mpirun(num_ranks)(command) if num_ranks > 1 else command)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 1), (2, 3)])
def test_one_run(num_ranks: int, batch: int, config: Path, runner: Runner) -> None:
    files = ("--json", str(runner.folder / "report.json"), "--plot", str(runner.folder / "plot.png"))
    sizes = ("--layers", "2", "--batch", str(batch))
    done = step(runner, str(config), *SHORT, *sizes, *files, num_ranks=num_ranks)
    assert done.status == 0, done.stderr[-3000:]
    report = Report.load(runner.folder / "report.json")
    assert (report.num_ranks, report.batch, report.num_layers, report.floor_ms) == (num_ranks, batch, 2, None)
    names = [row.name for row in report.rows]
    assert names == ["distmk", "eager, gloo" if num_ranks > 1 else "eager"]
    assert all(len(row.times_ms) == 2 and min(row.times_ms) > 0 for row in report.rows)
    # Float32 of the same weights: the first tokens are the same, unless two logits are as good as equal.
    same, of = map(int, report.rows[1].agreement.split(",")[0].split(" of "))
    assert of == (13 if batch == 1 else 20 + 12)
    assert same == of or float(report.rows[1].agreement.split("by ")[1]) < 1e-2, report.rows[1].agreement
    assert (runner.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in done.stdout.splitlines() if " x 12" in line] == [n.split()[0] for n in names]
    again = [*BENCH, "plot", str(runner.folder / "report.json"), "--output", str(runner.folder / "again.png")]
    assert runner.run(again).status == 0 and (runner.folder / "again.png").exists()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_a_rank_has_of_a_model(num_ranks: int) -> None:
    config = PRESETS["qwen3-8b"]
    part, whole = (shard_model(*made)[0] for made in ((part_of(config, num_ranks), 1), (config, num_ranks)))
    assert part == whole and Work(part_of(config, num_ranks)).step_bytes(part) == Work(config).step_bytes(whole)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 3), (2, 1)])
def test_step_time(num_ranks: int, batch: int, config: Path, runner: Runner) -> None:
    """scripts/step_time.py, which times distmk alone, prints one object, then the tables of the trace."""
    command = [sys.executable, str(ROOT / "scripts" / "step_time.py"), str(config), *SHORT, "--batch", str(batch)]
    done = runner.run(under_mpirun(num_ranks)([*command, "--trace"]) if num_ranks > 1 else command)
    assert done.status == 0, done.stderr[-3000:]
    first, *tables = done.stdout.splitlines()
    found = json.loads(first)
    assert (found["tensor_parallel"], found["batch"], found["layers"], found["repeats"]) == (num_ranks, batch, 3, 2)
    assert 0 < found["min"] <= found["ms_per_step"] <= found["max"]
    assert any(line.startswith("critical path") for line in tables) == (num_ranks > 1)
    assert "watts" not in found and ("idle_watts" in json.loads(runner.run([*command, "--power"]).stdout))
    refused = runner.run([*command, "--tokens", "0"])
    assert (refused.status, refused.stdout) == (2, "") and refused.stderr.startswith("distmk: --tokens is 0")


@pytest.mark.parametrize("loopback", ["", "1"])
def test_one_rank_adds_up_if_it_is_told_to(loopback: str, config: Path, runner: Runner) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "step_time.py"), str(config), *SHORT, "--trace"]
    done = runner.run(command, {"DISTMK_LOOPBACK": loopback})
    assert done.status == 0, done.stderr[-3000:]
    assert ("o.reduce" in done.stdout) == bool(loopback), done.stdout


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "129"), "--batch is 129; at most 128"),
        (("--tokens", "0"), "--tokens is 0"),
        (("--context", "50", "--tokens", "20"), "need 72 positions; the model has 64"),
        (("--layers", "0"), "--layers is 0"),
        (("--as-of", "0"), "--as-of is 0"),
        (("--as-of", "7"), "--as-of 7 does not divide the model's num_heads, "),
        (("--peer", "compiled"), "--peer compiled needs GPUs"),
        (("--json", "/nowhere/report.json"), "no folder /nowhere"),
        (("--beside", "/nowhere.json"), "/nowhere.json cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_mistakes(arguments: tuple[str, ...], said: str, config: Path, runner: Runner) -> None:
    """One line."""
    done = step(runner, str(config), *SHORT, *arguments)
    lines = done.stderr.splitlines()
    assert (done.status, done.stdout, len(lines)) == (2, "", 1), done
    assert lines[0].startswith("distmk: ") and said in lines[0]


def test_measurements_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that fails while its peers are timed leaves the rows before."""
    monkeypatch.setattr("benchmark.step.time_ours", lambda work, backend: Timed("distmk", [3.0, 2.0], [[1]], 5))
    monkeypatch.setattr("benchmark.peers.Peers", lambda *_: pytest.fail("a peer failed"))
    with connect() as bootstrap:
        comparison = Comparison("small", Work(SMALL), "host", bootstrap, tmp_path / "report.json")
        with pytest.raises(pytest.fail.Exception, match="a peer failed"):
            comparison.run(["eager"])
    assert Report.load(tmp_path / "report.json").rows == [Row("distmk", [3.0, 2.0], 5)]


def test_heads_that_do_not_part(config: Path, runner: Runner) -> None:
    config.write_text(json.dumps(hf_config(dataclasses.replace(SMALL, num_heads=6, num_kv_heads=3))))
    done = step(runner, str(config), *SHORT, num_ranks=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("distmk: ")]
    assert done.status == 2 and len(lines) == 1 and "do not part evenly into 2 ranks" in lines[0], done


def test_config_round_trip() -> None:
    for name, config in PRESETS.items():
        assert config_from_hf(hf_config(config), name) == config


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_of_a_step(num_ranks: int) -> None:
    """All weights of a rank, a row of the embedding for each sequence, and the positions of a sequence half-way through."""
    work = Work(SMALL, batch=4, context=20, tokens=10)
    for rank in range(num_ranks):
        weights = read_weights(
            DummyCheckpoint(SMALL, None, 0), num_ranks, rank, 64, torch.device("cpu"), torch.bfloat16
        )
        caches = 2 * SMALL.num_layers * weights.shard.num_kv * SMALL.head_dim * (20 + 5) * 4
        assert work.step_bytes(weights.shard) == 2 * (count(weights) + 4 * SMALL.hidden_size + caches)


def count(weights: Weights) -> int:
    tensors = [weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [value for value in vars(layer).values() if value is not None]
    return sum(tensor.numel() for tensor in tensors)


def test_report_says_what_it_is_told(tmp_path: Path) -> None:
    rows = [Row("distmk", [4.0, 5.0, 9.0], 256), Row("compiled", [6.0, 5.9, 6.1], 256, "3 of 257, then by 0.01")]
    speeds = {"6 copies in flight an SM": 4e12, "all copies in flight": 3e12}
    report = Report("qwen3-8b", 36, 2, "cuda", 1, 512, 256, 12_000_000_000, speeds, {"gpu": "H"}, rows, ["a note"])
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    text = report.text().splitlines()
    assert " ".join(text[-3].split()) == "distmk 5.000 4.000 9.000 3 x 256 60%"
    assert " ".join(text[-2].split()) == "compiled 6.000 5.900 6.100 3 x 256 50% 1.20x 3 of 257, then by 0.01"
    assert text[-1] == "a note"
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UsageError, match="is no report"):
        Report.load(tmp_path / "other.json")
