"""`scripts/bench.py growth`: which reports make a line, and a plot of runs on the host twin."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
from benchmark.growth import draw_growth, series
from benchmark.report import Report, Row
from benchmark.work import hf_config
from support.helpers import ROOT, Runner
from support.tiny_config import tiny_config

from distmk.errors import UsageError

BENCH = [sys.executable, str(ROOT / "scripts" / "bench.py")]
SMALL = tiny_config("qwen3-8b", hidden_size=48, intermediate_size=75, num_layers=2, num_kv_heads=2, head_dim=8)


def report(layers: int, ranks: int, batch: int) -> Report:
    times = [0.1 * layers / ranks + 0.01 * batch]
    return Report("qwen3-8b", layers, ranks, "cuda", batch, 512, 256, 10**9, {"": 4e12}, {}, [Row("distmk", times, 9)])


def test_lines() -> None:
    """A line has at least two reports, which differ in one size and are sorted by it."""
    sizes = [(4, 1, 1), (16, 1, 1), (36, 1, 1), (36, 2, 1), (36, 4, 1), (36, 1, 8), (36, 2, 8)]
    random.shuffle(sizes)
    reports = [report(*size) for size in sizes]
    at = {name: {label: [(r.num_layers, r.num_ranks, r.batch) for r in line] for label, line in series(reports, name).items()}
          for name in ("layers", "ranks", "batch")}  # fmt: skip
    assert at["layers"] == {"ranks 1, batch 1": [(4, 1, 1), (16, 1, 1), (36, 1, 1)]}
    assert at["ranks"] == {
        "layers 36, batch 1": [(36, 1, 1), (36, 2, 1), (36, 4, 1)],
        "layers 36, batch 8": [(36, 1, 8), (36, 2, 8)],
    }
    assert at["batch"] == {
        "layers 36, ranks 1": [(36, 1, 1), (36, 1, 8)],
        "layers 36, ranks 2": [(36, 2, 1), (36, 2, 8)],
    }


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no two reports differ"):
        draw_growth([report(4, 1, 1), report(8, 2, 1)], tmp_path / "growth.png")
    other = dataclasses.replace(report(8, 1, 1), context=1024)
    with pytest.raises(UsageError, match="of different models, lengths or backends"):
        draw_growth([report(4, 1, 1), other], tmp_path / "growth.png")
    with pytest.raises(UsageError, match="cannot be written"):
        draw_growth([report(4, 1, 1), report(8, 1, 1)], tmp_path / "nowhere" / "growth.png")


def test_runs_without_peers(runner: Runner) -> None:
    """Also with more layers than the model has; each run leaves its report."""
    config = runner.folder / "config.json"
    config.write_text(json.dumps(hf_config(SMALL)))
    files = []
    for layers, batch in ((1, 1), (3, 1), (1, 2)):
        files.append(str(runner.folder / f"{layers}-{batch}.json"))
        sizes = ("--context", "8", "--tokens", "8", "--repeats", "1", "--layers", str(layers), "--batch", str(batch))
        done = runner.run(
            [*BENCH, "step", str(config), "--backend", "host", *sizes, "--peer", "none", "--json", files[-1]]
        )
        assert done.status == 0, done.stderr[-3000:]
        found = Report.load(Path(files[-1]))
        assert (found.num_layers, found.batch, [row.name for row in found.rows]) == (layers, batch, ["distmk"])
        assert f"distmk: {found.rows[0].median_ms:.3f} ms a step" in done.stderr
    done = runner.run([*BENCH, "growth", *files, "--output", str(runner.folder / "growth.png")])
    assert done.status == 0, done.stderr
    assert (runner.folder / "growth.png").read_bytes().startswith(b"\x89PNG")
