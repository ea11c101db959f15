"""A matrix that files store in a quantized form: read as codes and scales, whatever tensors it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from distmk.errors import ModelError
from distmk.formats import QuantizedRows, WeightFormat
from distmk.model.bf16 import F32, I32, U16, f32_to_bf16

if TYPE_CHECKING:
    from distmk.weights.files import DataFile, StoredTensor

Range = tuple[int, int]


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """The matrix `name` of `shape`, [rows, cols], in a weight format.

    parts: the tensors that it is made of, by their names in the files.
    order: of the columns of an ordered format.
    """

    name: str
    shape: tuple[int, int]
    format: type[WeightFormat]
    parts: Mapping[str, StoredTensor]
    order: I32 | None = field(default=None, compare=False, kw_only=True)

    @abstractmethod
    def read(self, files: Sequence[DataFile], rows: Range, cols: Range) -> QuantizedRows:
        """A block of whole groups of columns. ModelError: a file is damaged, or a scale is not finite."""

    def read_bf16(self, files: Sequence[DataFile], rows: Range, cols: Range) -> U16:
        """A block of any columns, its values rounded to bfloat16 bits."""
        if self.order is not None:
            whole = np.empty((rows[1] - rows[0], self.shape[1]), np.float32)
            whole[:, self.order] = self.format.values(self.read(files, rows, (0, self.shape[1])))
            return f32_to_bf16(np.ascontiguousarray(whole[:, slice(*cols)]))
        first, last = self.format.whole_groups(*cols, self.shape[1])
        values = self.format.values(self.read(files, rows, (first, last)))
        return f32_to_bf16(np.ascontiguousarray(values[:, cols[0] - first : cols[1] - first]))

    def check_scales(self, scales: F32, where: object, tensor: str) -> None:
        """ModelError, with the name of the tensor: a scale is not finite."""
        if not np.isfinite(scales).all():
            raise ModelError(f"{where}: tensor {tensor} has scales that are NaN or infinite; fetch the model again")
