"""Matrices of GGUF files whose blocks are a weight format: read as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distmk.errors import ModelError
from distmk.formats import FORMATS, QuantizedRows
from distmk.formats.gguf_blocks import GgufBlocks
from distmk.weights.files import DataFile, StoredTensor, read_raw_rows
from distmk.weights.quantized_tensor import QuantizedTensor, Range

PACKED: Mapping[str, type[GgufBlocks]] = {
    found.kind: found for found in FORMATS.values() if issubclass(found, GgufBlocks)
}
"""The weight formats of GGUF types, by the names of the types."""


class GgufTensor(QuantizedTensor):
    """A matrix of blocks; its only part is the tensor itself."""

    def read(self, files: Sequence[DataFile], rows: Range, cols: Range) -> QuantizedRows:
        assert issubclass(self.format, GgufBlocks)
        (stored,) = self.parts.values()
        raw = QuantizedRows.of_blocks(read_raw_rows(files, stored, *rows))
        blocks = self.format.cut(raw, *cols)
        if not np.isfinite(self.format.scales_of(blocks)).all():
            raise ModelError(
                f"{files[stored.file].path}: tensor {self.name} has weights that are NaN or infinite; "
                "fetch the model again, or a version that was saved without them"
            )
        return blocks


def find_packed(tensors: Mapping[str, StoredTensor]) -> dict[str, GgufTensor]:
    """The matrices whose blocks are a weight format."""
    return {
        name: GgufTensor(name, (stored.shape[0], stored.shape[1]), PACKED[stored.encoding.name], {name: stored})
        for name, stored in tensors.items()
        if len(stored.shape) == 2 and stored.encoding.name in PACKED
    }
