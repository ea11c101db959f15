"""Matrices of 4-bit integers in safetensors files, as compressed-tensors, AWQ and GPTQ store them.

All three pack eight codes in an int32. An element is (code - zero) * scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.formats import QuantizedRows, find_format
from distmk.formats.int4_groups import MIDDLE
from distmk.formats.weight_format import U8
from distmk.model.bf16 import F32, I32
from distmk.weights.files import DataFile, StoredTensor
from distmk.weights.quantization_config import Quantization
from distmk.weights.quantized_tensor import QuantizedTensor, Range

CODES_IN_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose code AWQ stores in each half byte of a word (AutoAWQ, `order_map` of WQLinear_GEMM)."""

Words = npt.NDArray[np.int32]


def unpacked(words: Words, axis: int, order: Sequence[int] = range(CODES_IN_WORD)) -> U8:
    """The codes in int32 words, half byte i at place order[i] of eight along `axis`."""
    shifts = 4 * np.argsort(np.asarray(order)).astype(np.uint32)
    codes = (np.expand_dims(words.view(np.uint32), axis + 1) >> shifts.reshape(-1, *[1] * (words.ndim - axis - 1))) & 15
    shape = list(words.shape)
    shape[axis] *= CODES_IN_WORD
    return codes.astype(np.uint8).reshape(shape)


@dataclass(frozen=True)
class Int4Tensor(QuantizedTensor):
    """group: columns of a scale in the files, a multiple of the format's.

    zero_shift: see `Quantization`.
    """

    base: str
    group: int
    zero_shift: int

    def read(self, files: Sequence[DataFile], rows: Range, cols: Range) -> QuantizedRows:
        codes, scales, zeros = self._codes(files, rows), self._scales(files, rows), self._zeros(files, rows)
        step, count = self.format.group_cols, -(-self.shape[1] // self.format.group_cols)
        stored_groups = np.arange(count) * step // self.group
        if self.order is not None:
            codes = np.ascontiguousarray(codes[:, self.order])
        whole = QuantizedRows(codes, scales[:, stored_groups], zeros[:, stored_groups])
        return self.format.cut(whole, *cols)

    @abstractmethod
    def _codes(self, files: Sequence[DataFile], rows: Range) -> U8:
        """[rows, all columns]."""

    @abstractmethod
    def _scales(self, files: Sequence[DataFile], rows: Range) -> F32:
        """[rows, groups of the files]."""

    @abstractmethod
    def _zeros(self, files: Sequence[DataFile], rows: Range) -> U8:
        """[rows, groups of the files]."""

    def _array(self, files: Sequence[DataFile], suffix: str, rows: Range | None = None) -> Any:
        """A tensor, or some of its rows: float32 of floats, int32 of packed codes."""
        name = f"{self.base}.{suffix}"
        stored = self.parts[name]
        begin, end = rows or (0, stored.shape[0])
        row_bytes = stored.num_bytes // stored.shape[0]
        raw = files[stored.file].read(stored.offset + begin * row_bytes, (end - begin) * row_bytes)
        if stored.encoding.name == "I32":
            return raw.view("<i4").reshape(end - begin, *stored.shape[1:])
        values = stored.encoding.to_f32(raw).reshape(end - begin, -1)
        self.check_scales(values, files[stored.file].path, name)
        return values


class PackedRows(Int4Tensor):
    """compressed-tensors, pack-quantized: weight_packed [rows, cols / 8], weight_scale [rows, groups] and
    weight_zero_point [rows / 8, groups]. Codes and zero points are stored plus 8.
    """

    def _codes(self, files: Sequence[DataFile], rows: Range) -> U8:
        return unpacked(self._array(files, "weight_packed", rows), 1)[:, : self.shape[1]]

    def _scales(self, files: Sequence[DataFile], rows: Range) -> F32:
        scales: F32 = self._array(files, "weight_scale", rows)
        return scales

    def _zeros(self, files: Sequence[DataFile], rows: Range) -> U8:
        if f"{self.base}.weight_zero_point" not in self.parts:
            return np.full((rows[1] - rows[0], -(-self.shape[1] // self.group)), MIDDLE, np.uint8)
        first, last = rows[0] // CODES_IN_WORD, -(-rows[1] // CODES_IN_WORD)
        zeros = unpacked(self._array(files, "weight_zero_point", (first, last)), 0)
        return zeros[rows[0] - first * CODES_IN_WORD :][: rows[1] - rows[0]]


class TransposedCodes(Int4Tensor):
    """AWQ and GPTQ: scales [groups, rows] and qzeros [groups, rows / 8], for x @ weight instead of x @ weight.T."""

    code_order: Sequence[int] = range(CODES_IN_WORD)

    def _scales(self, files: Sequence[DataFile], rows: Range) -> F32:
        return np.ascontiguousarray(self._array(files, "scales")[:, slice(*rows)].T)

    def _zeros(self, files: Sequence[DataFile], rows: Range) -> U8:
        zeros = self._columns(self._array(files, "qzeros"), rows) + np.uint8(self.zero_shift)
        return np.ascontiguousarray(zeros.T)

    def _columns(self, words: Words, rows: Range) -> U8:
        """Columns of a tensor whose words have eight columns."""
        first, last = rows[0] // CODES_IN_WORD, -(-rows[1] // CODES_IN_WORD)
        begin = rows[0] - first * CODES_IN_WORD
        return unpacked(words[:, first:last], 1, self.code_order)[:, begin : begin + rows[1] - rows[0]]


class AwqTensor(TransposedCodes):
    """qweight [cols, rows / 8], whose words have eight rows of the matrix (Lin et al., "AWQ", arXiv:2306.00978)."""

    code_order = AWQ_ORDER

    def _codes(self, files: Sequence[DataFile], rows: Range) -> U8:
        return np.ascontiguousarray(self._columns(self._array(files, "qweight"), rows).T)


class GptqTensor(TransposedCodes):
    """qweight [cols / 8, rows], whose words have eight columns of the matrix (Frantar et al., "GPTQ", arXiv:2210.17323)."""

    def _codes(self, files: Sequence[DataFile], rows: Range) -> U8:
        words = self._array(files, "qweight")[:, slice(*rows)]
        return np.ascontiguousarray(unpacked(words, 0)[: self.shape[1]].T)


@dataclass(frozen=True)
class Layout:
    """The tensors of a method: suffixes, and shapes as functions of rows, columns and groups."""

    kind: type[Int4Tensor]
    codes: str
    scales: str
    zeros: str
    order: str | None
    is_transposed: bool


COMPRESSED = Layout(PackedRows, "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", False)
LAYOUTS: Mapping[str, Layout] = {
    "compressed-tensors": COMPRESSED,
    "awq": Layout(AwqTensor, "qweight", "scales", "qzeros", None, True),
    "gptq": Layout(GptqTensor, "qweight", "scales", "qzeros", "g_idx", True),
}


def _shape_of(layout: Layout, codes: StoredTensor) -> tuple[int, int]:
    first, second = codes.shape
    if layout.kind is PackedRows:
        return first, second * CODES_IN_WORD
    return (second * CODES_IN_WORD, first) if layout.kind is AwqTensor else (second, first * CODES_IN_WORD)


def find_int4(
    base: str, tensors: Mapping[str, StoredTensor], scheme: Quantization, files: Sequence[DataFile]
) -> Int4Tensor | None:
    """The matrix `base`.weight of 4-bit codes; None: there are none. ModelError: tensors are missing or misshapen."""
    layout = LAYOUTS[scheme.method]
    codes = tensors.get(f"{base}.{layout.codes}")
    if codes is None or codes.encoding.name != "I32" or len(codes.shape) != 2:
        return None
    where, (num_rows, num_cols) = files[codes.file].path, _shape_of(layout, codes)
    group = scheme.group or num_cols
    num_groups = -(-num_cols // group)
    if num_cols % group:
        raise ModelError(
            f"{where}: tensor {base}.{layout.codes} has {num_cols} inputs, no whole number of groups of {group}"
        )
    packed_rows = -(-num_rows // CODES_IN_WORD)
    shapes = {layout.scales: (num_rows, num_groups)}
    if layout is not COMPRESSED or f"{base}.{layout.zeros}" in tensors:
        shapes[layout.zeros] = (packed_rows, num_groups)
    parts = {f"{base}.{layout.codes}": codes}
    for suffix, (rows, groups) in shapes.items():
        name, want = f"{base}.{suffix}", [groups, rows] if layout.is_transposed else [rows, groups]
        stored = tensors.get(name)
        if stored is None:
            raise ModelError(f"{where}: tensor {name} is missing; {base}.{layout.codes} needs it")
        if list(stored.shape) != want:
            raise ModelError(f"{where}: tensor {name} has shape {list(stored.shape)}; {want} was expected")
        if (stored.encoding.name == "I32") != (suffix == layout.zeros):
            raise ModelError(f"{where}: tensor {name} has dtype {stored.encoding.name}, which {suffix} cannot have")
        parts[name] = stored
    name, order = "int4" if group % 128 == 0 or group == num_cols else "int4_g32", None
    if stored_order := tensors.get(f"{base}.{layout.order}"):
        parts[f"{base}.{layout.order}"] = stored_order
        order = _read_order(f"{base}.{layout.order}", stored_order, num_cols, group, files)
    found = find_format(name if order is None else f"{name}_ordered")
    shape = (num_rows, num_cols)
    return layout.kind(f"{base}.weight", shape, found, parts, base, group, scheme.zero_shift, order=order)


def _read_order(name: str, stored: StoredTensor, num_cols: int, group: int, files: Sequence[DataFile]) -> I32 | None:
    """The columns sorted by the groups that the tensor `name` has for them; None: they are sorted.

    ModelError: there are no such groups, or not as many columns of each.
    """
    file = files[stored.file]
    if stored.encoding.name != "I32" or stored.shape != (num_cols,):
        raise ModelError(f"{file.path}: tensor {name} has shape {list(stored.shape)}; [{num_cols}] of I32 was expected")
    groups = file.read(stored.offset, stored.num_bytes).view("<i4")
    num_groups = num_cols // group
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ModelError(
            f"{file.path}: tensor {name} has groups from {groups.min()} to {groups.max()}; 0 to {num_groups - 1} were expected"
        )
    if (np.bincount(groups, minlength=num_groups) != group).any():
        raise ModelError(f"{file.path}: tensor {name} does not have {group} columns in every group")
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(num_cols)) else order
