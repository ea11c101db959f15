"""Weight upload: the same bytes through numpy and through device tensors (here torch's on the CPU), for any sharding."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.tiny import Family, make, save

from distmk.backends import weight_upload as heap
from distmk.graph.regions import Weight, WeightKind
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.operators import Embedding, Head, Operator, SelfAttention
from distmk.model.presets import PRESETS
from distmk.models import build_model
from distmk.program import file as program_file
from distmk.program.layout import Placed
from distmk.program.program import Program, compile_graph
from distmk.progress import Progress
from distmk.weights import Checkpoint, open_checkpoint
from distmk.weights.choose_formats import QUANTIZING, choose_formats
from distmk.weights.rows import DeviceRows, HostRows

CPU = torch.device("cpu")


class Memory:
    """The memory of a backend that asks for arrays or for tensors."""

    name = "memory"

    def __init__(self, device: str) -> None:
        self.device = device
        self.pieces: dict[str, npt.NDArray[np.uint8]] = {}

    def write(self, placed: Placed, offset_bytes: int, array: Any) -> None:
        assert isinstance(array, np.ndarray) or self.device != "cpu", "the host twin does without torch"
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        piece = self.pieces.setdefault(placed.name, np.full(placed.num_bytes, 0xEE, np.uint8))
        piece[offset_bytes : offset_bytes + raw.size] = raw


FACTORS = {"model.embed_tokens": 11.5, "head": 0.125, ".o": 0.22, ".down": -0.37, "o_proj.bias": 0.22}  # by ending
OFFSET = 1.0  # of norm weights


def scaled(op: Operator) -> Operator:
    """An operator with FACTORS and OFFSET, as far as it has weights to apply them to."""
    if isinstance(op, Embedding):
        return dataclasses.replace(op, scale=FACTORS["model.embed_tokens"])
    if isinstance(op, Head):
        return dataclasses.replace(op, scale=FACTORS["head"], norm_offset=OFFSET)
    name, matrix = ("o", op.o) if isinstance(op, SelfAttention) else ("down", op.down)
    out = {name: dataclasses.replace(matrix, scale=FACTORS[f".{name}"])}
    return dataclasses.replace(op, **out, norm_offset=OFFSET)


def tiled_program(
    checkpoint: Checkpoint,
    num_ranks: int,
    change: Callable[[Operator], Operator] = scaled,
    quantization: str | None = None,
) -> Program:
    options = DecodeOptions(num_ranks, 3, max_model_len=64, tiled=True)
    formats = choose_formats(checkpoint, quantization, tiled=True)
    model = build_model(dataclasses.replace(checkpoint.config, formats=formats))
    model = dataclasses.replace(model, operators=tuple(map(change, model.operators)))
    return compile_graph(*lower_programs(model, options))


def fill(checkpoint: Checkpoint, program: Program, rank: int, device: str, monkeypatch: Any) -> dict[str, Any]:
    """The bytes of every weight; pieces are so small that matrices take several."""
    monkeypatch.setattr(HostRows, "piece_bytes", 5000)
    monkeypatch.setattr(DeviceRows, "piece_bytes", 9000)
    monkeypatch.setattr(heap, "open_rows", lambda c, d: HostRows(c) if d == "cpu" else DeviceRows(c, "cpu"))
    memory = Memory(device)
    loaded = Progress("loading the weights")
    heap.fill_weights(program, memory, rank, checkpoint, loaded)  # type: ignore[arg-type]
    assert loaded.done == loaded.total == sum(piece.size for piece in memory.pieces.values()) and loaded.unit == "B"
    return memory.pieces


@pytest.fixture(params=["bf16 file", "f32 file", "dummy"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A model whose columns are no multiple of 64, and the rows of its slabs none of 16; with norms of heads, or biases."""
    sizes = {"hidden_size": 80, "intermediate_size": 88, "num_attention_heads": 5, "num_key_value_heads": 5}
    family: Family = "llama" if request.param == "f32 file" else "qwen3"
    model = make(family, seed=3, attention_bias=family == "llama", **sizes)
    if request.param == "bf16 file":
        model = model.to(torch.bfloat16)
    return open_checkpoint(save(model, tmp_path), "dummy" if request.param == "dummy" else "auto", 4)


@pytest.mark.parametrize("quantization", [None, *QUANTIZING])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_host_and_device_upload_the_same(
    checkpoint: Checkpoint, num_ranks: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tiled_program(checkpoint, num_ranks, quantization=quantization)
    for rank in range(num_ranks):
        host, device = (fill(checkpoint, program, rank, kind, monkeypatch) for kind in ("cpu", "cuda"))
        assert host.keys() == device.keys()
        for name, want in host.items():
            wrong = np.flatnonzero(device[name] != want)
            assert not wrong.size, f"rank {rank}, {name}: {wrong.size} bytes differ, the first at {wrong[0]}"


def factor_of(weight: Weight, is_scaled: bool) -> float:
    return next((value for end, value in FACTORS.items() if is_scaled and weight.name.endswith(end)), 1.0)


def unpacked(weight: Weight, checkpoint: Checkpoint, is_scaled: bool) -> npt.NDArray[np.uint16]:
    """A matrix from the checkpoint: the rows of its segments, times the norm's weight and its factor."""
    cols = slice(weight.col_begin, weight.col_begin + weight.cols)
    rows = np.concatenate([checkpoint.read(s.tensor)[s.row_begin : s.row_end, cols] for s in weight.segments])
    values = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).float()
    factors = torch.full((weight.cols,), factor_of(weight, is_scaled))
    if weight.name == "head" or weight.name.endswith((".qkv", ".gate_up")):
        norm = torch.from_numpy(checkpoint.read_vector(weight.col_scale or "")[cols])
        factors *= norm + OFFSET if is_scaled else norm
    return (values * factors).bfloat16().view(torch.int16).numpy().view(np.uint16)


def vector(weight: Weight, checkpoint: Checkpoint, is_scaled: bool) -> npt.NDArray[np.float32]:
    """A vector from the checkpoint: plus OFFSET if it is a norm's, or times its factor."""
    values = np.concatenate([checkpoint.read_vector(s.tensor)[s.row_begin : s.row_end] for s in weight.segments])
    if "norm" in weight.name:
        return values + np.float32(OFFSET if is_scaled else 0)
    return values * np.float32(factor_of(weight, is_scaled))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_every_row_is_uploaded(checkpoint: Checkpoint, is_scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing aside, each slab holds the checkpoint's elements, scaled, and zeros beyond its columns."""
    program = tiled_program(checkpoint, 2, scaled if is_scaled else lambda op: op)
    for rank in range(2):
        pieces = fill(checkpoint, program, rank, "cuda", monkeypatch)
        for weight, placed in program.placement.weights.items():
            if weight.rank == rank and weight.kind is WeightKind.VECTOR:
                values = pieces[placed.name].view(np.float32)
                assert np.array_equal(values, vector(weight, checkpoint, is_scaled)), weight.name
            if weight.rank != rank or weight.kind is not WeightKind.MATRIX:
                continue
            got = pieces[placed.name].view(np.uint16).reshape(weight.rows, -1)
            want = unpacked(weight, checkpoint, is_scaled)
            for begin, end in weight.tiling.slabs if weight.tiling else [(0, weight.rows)]:
                rows = np.zeros((end - begin, got.shape[1]), np.uint16)
                rows[:, : weight.cols] = want[begin:end]
                same = np.array_equal(np.sort(got[begin:end], axis=None), np.sort(rows, axis=None))
                assert same if weight.tiling else np.array_equal(got, want), f"{weight.name} rows {begin} to {end}"


def test_scales_are_saved_with_a_program(checkpoint: Checkpoint, tmp_path: Path) -> None:
    program = tiled_program(checkpoint, 2)
    program_file.save(program, tmp_path / "program")
    saved = program_file.load(tmp_path / "program", 1).placement.weights
    kept = [dataclasses.asdict(weight) for weight in program.placement.weights if weight.rank == 1]
    assert [dataclasses.asdict(weight) for weight in saved] == kept
    assert len({weight.scale for weight in saved}) == 5 and {weight.offset for weight in saved} == {0.0, OFFSET}


def test_dummy_weights_are_the_same_on_host_and_device() -> None:
    """numpy and torch agree in every bit, for any rows and columns."""
    checkpoint: Any = open_checkpoint("smollm2-135m", "dummy", 9)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for name, (num_rows, num_cols) in {
        "model.layers.2.mlp.gate_proj.weight": (1536, 576),
        "model.layers.2.mlp.down_proj.weight": (576, 1536),
        "lm_head.weight": (PRESETS["smollm2-135m"].vocab_size, 576),
    }.items():
        begin, end = sorted(rng.sample(range(num_rows + 1), 2))
        first, last = sorted(rng.sample(range(num_cols + 1), 2))
        parts, cols = [(name, begin, end), (name, 0, 7)], slice(first, last)
        out = torch.full((end - begin + 7, last - first), -1, dtype=torch.int16)
        checkpoint.make(parts, cols, out)
        want = np.concatenate([checkpoint.read(name, slice(a, b), cols) for _, a, b in parts])
        wrong = np.argwhere(out.numpy().view(np.uint16) != want)
        assert not wrong.size, (
            f"{name} rows {begin} to {end}, columns {first} to {last}: differs at {wrong[0].tolist()}"
        )
