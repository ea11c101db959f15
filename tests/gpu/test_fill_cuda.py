"""Weights in a GPU's memory equal those of the host, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.machine import num_gpus
from support.tiny import make, save

from distmk.backends.defaults import why_no_cuda
from distmk.formats import find_format
from distmk.formats.tiles import pack_rows
from distmk.weights import open_checkpoint
from distmk.weights.choose_formats import QUANTIZING
from distmk.weights.rows import Tiled, open_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(num_gpus() < 1, reason=f"the cuda backend cannot run here: {why_no_cuda()}"),
]


@pytest.mark.parametrize("kind", ["bf16 file", "f32 file", "dummy"])
def test_rows_and_tiles(kind: str, tmp_path: Path) -> None:
    """Many reads in a row, so that a copy still under way would be overwritten."""
    model = make("llama", seed=3, hidden_size=80, intermediate_size=600, num_attention_heads=5, num_key_value_heads=5)
    folder = save(model.to(torch.bfloat16) if kind == "bf16 file" else model, tmp_path)
    checkpoint = open_checkpoint(folder, "dummy" if kind == "dummy" else "auto", 4)
    host, device = (open_rows(checkpoint, where) for where in ("cpu", "cuda"))
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    found: list[tuple[Any, Any]] = []
    for begin in range(0, 560, 7):
        parts = [(name, begin, begin + 23) for name in names]
        found.append(tuple(pack_rows(rows.read(parts, slice(1, 79)), [46], True) for rows in (host, device)))
    for number, (want, got) in enumerate(found):
        wrong = np.argwhere(got.cpu().numpy().view(np.uint16) != want)
        assert not wrong.size, f"{kind}: read {number}: {len(wrong)} elements differ, the first at {wrong[0].tolist()}"


@pytest.mark.parametrize("name", QUANTIZING)
def test_quantized_tiles(name: str) -> None:
    """Quantized on the GPU, and columns that begin and end inside of groups."""
    checkpoint, found = open_checkpoint("qwen3-8b", "dummy", 1), find_format(name)
    parts = [("model.layers.0.mlp.down_proj.weight", 3, 1003)]
    cols, factors = slice(3072, 3072 + 3000), np.full(1, 0.7, np.float32)
    tiled = Tiled([500, 300, 200], True)
    host, device = (
        open_rows(checkpoint, where).read_packed(parts, cols, found, factors, tiled) for where in ("cpu", "cuda")
    )
    wrong = np.argwhere(device.cpu().numpy() != host)
    assert not wrong.size, f"{len(wrong)} bytes differ, the first at {wrong[0].tolist()}"


def test_every_dummy_value() -> None:
    """Of a whole matrix of a real size: numpy's arithmetic and the GPU's agree in every bit."""
    checkpoint = open_checkpoint("qwen3-8b", "dummy", 1)
    name = "model.layers.0.mlp.down_proj.weight"
    host, device = (open_rows(checkpoint, where).read([(name, 0, 1024)], slice(0, 12288)) for where in ("cpu", "cuda"))
    wrong = np.argwhere(device.cpu().numpy().view(np.uint16) != host)
    assert not wrong.size, f"{len(wrong)} elements differ, the first at {wrong[0].tolist()}"
