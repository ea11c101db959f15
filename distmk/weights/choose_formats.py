"""The weight format of every matrix in memory: as the checkpoint stores it, or as the user asks for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from distmk.errors import UsageError
from distmk.formats import FORMATS, Bf16, WeightFormat, find_format
from distmk.model.config import ModelConfig
from distmk.model.operators import Embedding, Head, Mlp, Model
from distmk.models import build_model, expected_tensors
from distmk.weights.checkpoint import Checkpoint

QUANTIZING = tuple(found.name for found in FORMATS.values() if found.quantizes)
"""Formats that bf16 weights can be quantized to when they are loaded."""

STORED_METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "gguf")
"""Quantization methods of files, by vLLM's names."""

WEIGHT = ".weight"
MOST_NAMED = 3  # matrices in a line
Formats = tuple[tuple[str, str], ...]


def check_quantization(name: str) -> str:
    """UsageError: no method has that name."""
    if name not in (*QUANTIZING, *STORED_METHODS, Bf16.name):
        known = ", ".join(dict.fromkeys((*QUANTIZING, *STORED_METHODS, Bf16.name)))
        raise UsageError(f"quantization is {name!r}; methods are {known}")
    return name


def choose_formats(checkpoint: Checkpoint, quantization: str | None, tiled: bool) -> Formats:
    """`ModelConfig.formats` for a checkpoint.

    quantization: None or the method of the checkpoint's files: matrices stay as stored. "bf16": they become bf16. One of
    QUANTIZING, for a checkpoint in bf16: linear layers are quantized, but neither the head nor the embedding, as in
    vLLM. tiled: for GPUs, where matrices become bf16 if their format lets them.

    UsageError: the checkpoint is not of that method, or a matrix has an unknown format.
    """
    formats = {name.removesuffix(WEIGHT): kind for name, kind in checkpoint.formats.items()}
    model = build_model(checkpoint.config)
    matrices = dict(model.matrix_formats)
    for name, kind in matrices.items():
        find_format(kind, f"the weight format of {name}")
    if quantization == Bf16.name:
        formats = {}
    elif quantization not in (None, checkpoint.quantization):
        _check_can_quantize(checkpoint, str(quantization))
        tables = {op.table for op in model.operators if isinstance(op, Embedding | Head)}
        formats = {name: str(quantization) for name in matrices if name not in tables}
    formats = {name: kind for name, kind in matrices.items() if kind != Bf16.name} | formats
    for gate, up in _differently_ordered(checkpoint, model, formats):
        formats |= {gate: Bf16.name, up: Bf16.name}
    if tiled:
        looked_up = {op.table for op in model.operators if isinstance(op, Embedding)}
        formats = {name: kind for name, kind in formats.items() if _stays(find_format(kind), name in looked_up)}
    return tuple(sorted(formats.items()))


def _stays(found: type[WeightFormat], is_looked_up: bool) -> bool:
    """Whether a matrix stays in its format on GPUs, which look rows up in bf16 alone."""
    return not found.may_be_bf16 or (found.runs_on_gpu and not is_looked_up)


def _differently_ordered(checkpoint: Checkpoint, model: Model, formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Gate and up of the layers in which their columns are stored in different orders. One task cannot have both."""
    for op in model.operators:
        if isinstance(op, Mlp):
            pair = (op.gate.tensor, op.up.tensor)
            if all(find_format(formats.get(name, Bf16.name)).is_ordered for name in pair):
                gate, up = (checkpoint.read_order(name + WEIGHT) for name in pair)
                if not np.array_equal(gate, up):
                    yield pair


def _check_can_quantize(checkpoint: Checkpoint, quantization: str) -> None:
    if checkpoint.quantization:
        raise UsageError(
            f"quantization is {quantization!r}, but the model's files are {checkpoint.quantization}; leave it out"
        )
    if quantization not in QUANTIZING:
        raise UsageError(
            f"quantization is {quantization!r}, but the model's weights are not quantized; "
            f"they can be, to {' or '.join(QUANTIZING)}, when they are loaded"
        )


class FormatBytes(NamedTuple):
    """The matrices of a format, and the bytes that they take together on all ranks."""

    format: str
    names: list[str]
    num_bytes: int

    @property
    def listed(self) -> str:
        """The matrices' names if they are few, else their number."""
        return ", ".join(self.names) if len(self.names) <= MOST_NAMED else f"{len(self.names)} matrices"


def bytes_by_format(config: ModelConfig) -> list[FormatBytes]:
    """The formats of the model's matrices in alphabetical order."""
    shapes = expected_tensors(config)
    num_bytes: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for name, kind in dict(build_model(config).matrix_formats).items():
        *rows, cols = shapes[name + WEIGHT]
        num_bytes[kind] += find_format(kind, f"the weight format of {name}").slab_bytes(
            math.prod(rows), cols, tiled=False
        )
        names[kind].append(name)
    return [FormatBytes(kind, names[kind], num_bytes[kind]) for kind in sorted(names)]


def describe_formats(config: ModelConfig) -> str | None:
    """One line: the formats of the model's matrices, and the memory that these take. None: all are bf16."""
    formats = bytes_by_format(config)
    if [each.format for each in formats] == [Bf16.name]:
        return None
    parts = (f"{each.format} {each.listed} {each.num_bytes / 1e6:.0f} MB" for each in formats)
    return f"weights stay packed: {'; '.join(parts)}"
