"""The interface of a checkpoint, whatever its file format, and the check of its tensors against a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from distmk.errors import ModelError
from distmk.formats import QuantizedRows
from distmk.model.bf16 import F32, I32, U16
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.weights.unused import report_unused

RowRange = tuple[str, int, int]
"""Rows [begin, end) of the tensor with that name."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ModelFiles(Protocol):
    """The source of a tokenizer and chat templates."""

    @property
    def path(self) -> Path | None:
        """The folder or file of a model; None for a preset."""


class Checkpoint(ModelFiles, Protocol):
    """Weights by their Hugging Face names, read a slice at a time.

    `fingerprint` is a sha256 that identifies a checkpoint. Ranks compare it to verify that they have opened the same
    one. It samples the files, so it does not prove that every byte is equal.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    @property
    def fingerprint(self) -> str:
        """64 hex digits."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: contents of the files that are not used, or that are used although the config says otherwise."""

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, out: U16 | None = None) -> U16:
        """A block of the 2-D tensor `name` as bfloat16 bits: uint16 [rows, cols], C-contiguous, owned by the caller.

        `out`: an array of that shape to read into. Other stored types are rounded to nearest even. `lm_head.weight` of
        a model with tied embeddings reads the embedding. ModelError: the tensor is not in the checkpoint, is not 2-D,
        or its file is damaged. ValueError: a slice has a step or leaves the tensor.
        """

    @property
    def quantization(self) -> str | None:
        """The method by which the files are quantized, by vLLM's name, such as "awq"; None: they are not."""

    @property
    def formats(self) -> Mapping[str, str]:
        """The weight format in which each matrix is stored, by the matrix' name; matrices in bf16 are left out."""

    def read_quantized(self, name: str, rows: slice, cols: slice) -> QuantizedRows:
        """A block of a matrix in `formats`, in its format: whole groups of columns. Errors as for `read`."""

    def read_order(self, name: str) -> I32:
        """The columns of a matrix of `formats` in the order in which its rows have them: int32 [columns]."""

    def read_vector(self, name: str) -> F32:
        """The 1-D tensor `name` as float32 [size], not rounded. ModelError: as for `read`."""

    def has(self, name: str) -> bool:
        """Whether `name` can be read."""

    def close(self) -> None:
        """Close the files; later reads raise ModelError. May be called twice."""


class PlainMatrices:
    """The part of a `Checkpoint` that concerns quantized matrices, of one that has none."""

    @property
    def quantization(self) -> str | None:
        return None

    @property
    def formats(self) -> Mapping[str, str]:
        return {}

    def read_quantized(self, name: str, rows: slice, cols: slice) -> QuantizedRows:
        raise ModelError(f"tensor {name} is not quantized")

    def read_order(self, name: str) -> I32:
        raise ModelError(f"tensor {name} is not quantized")


def check_tensors(stored: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> tuple[str, ...]:
    """Check the tensors of a checkpoint against a config.

    `stored`: shapes by name. `where` names the checkpoint. Returns warnings about additional tensors that do not change
    the result. ModelError: a tensor that `config` calls for is missing, or an additional one would change the result.
    """
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in stored:
            why = ", not tied to the embedding" if name == HEAD else ""
            raise ModelError(
                f"{where}: tensor {name} is missing; the config calls for it with shape {list(shape)}{why}"
            )
        if stored[name] != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {list(stored[name])}; the config calls for {list(shape)}"
            )
    return report_unused(stored.keys() - expected.keys(), config, where)


def bounds(part: slice | None, size: int, what: str) -> tuple[int, int]:
    """The half-open range of `part` in a dimension of `size`. ValueError: it has a step, or leaves the tensor `what`."""
    if part is None:
        return 0, size
    start = 0 if part.start is None else int(part.start)
    stop = size if part.stop is None else int(part.stop)
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise ValueError(
            f"{what}: slice {start}:{stop} (step {part.step}) of {size}; expected 0 <= start <= stop <= size"
        )
    return start, stop
