"""FP8 matrices of safetensors files: E4M3 codes, and scales by block, row or tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distmk.errors import ModelError
from distmk.formats import QuantizedRows, find_format
from distmk.formats.e4m3 import NAN
from distmk.model.bf16 import F32
from distmk.weights.files import DataFile, StoredTensor
from distmk.weights.quantization_config import Quantization
from distmk.weights.quantized_tensor import QuantizedTensor, Range

CODES = "F8_E4M3"
SCALE_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8Tensor(QuantizedTensor):
    """block_rows: rows that share a scale."""

    codes: StoredTensor
    scale_name: str
    block_rows: int

    def read(self, files: Sequence[DataFile], rows: Range, cols: Range) -> QuantizedRows:
        file, num_cols = files[self.codes.file], self.shape[1]
        raw = file.read(self.codes.offset + rows[0] * num_cols, (rows[1] - rows[0]) * num_cols)
        codes = raw.reshape(-1, num_cols)[:, cols[0] : cols[1]]
        if (codes & 0x7F == NAN).any():
            raise ModelError(f"{file.path}: tensor {self.name} has weights that are NaN; fetch the model again")
        group = self.format.group_cols
        first_block = rows[0] // self.block_rows
        scales = self._scales(files)[first_block : -(-rows[1] // self.block_rows)]
        if group > 1:
            scales = scales[:, cols[0] // group : -(-cols[1] // group)]
        begin = rows[0] - first_block * self.block_rows
        by_row = np.repeat(scales, self.block_rows, 0)[begin : begin + len(codes)]
        return QuantizedRows(codes, by_row, np.empty((len(codes), 0), np.uint8))

    def _scales(self, files: Sequence[DataFile]) -> F32:
        """float32 [blocks of rows, groups]."""
        stored = self.parts[self.scale_name]
        file = files[stored.file]
        scales = stored.encoding.to_f32(file.read(stored.offset, stored.num_bytes))
        self.check_scales(scales, file.path, self.scale_name)
        return scales.reshape(-(-self.shape[0] // self.block_rows), -1)


def find_fp8(
    base: str, tensors: Mapping[str, StoredTensor], scheme: Quantization, files: Sequence[DataFile]
) -> Fp8Tensor | None:
    """The FP8 matrix `base`.weight; None: that is no FP8 tensor. ModelError: its scales are missing or misshapen."""
    name = f"{base}.weight"
    codes = tensors.get(name)
    if codes is None or codes.encoding.name != CODES or len(codes.shape) != 2:
        return None
    where = files[codes.file].path
    scale_name = next((f"{base}.{kind}" for kind in SCALE_NAMES if f"{base}.{kind}" in tensors), None)
    if scale_name is None:
        wanted = f"{base}.{SCALE_NAMES[0] if scheme.group and scheme.method == 'fp8' else SCALE_NAMES[1]}"
        raise ModelError(f"{where}: tensor {wanted} is missing; it has the scales of {name}")
    scales, (num_rows, num_cols) = tensors[scale_name], codes.shape
    if scales.encoding.name not in ("F32", "F16", "BF16"):
        raise ModelError(f"{where}: tensor {scale_name} has dtype {scales.encoding.name}; scales are F32, F16 or BF16")
    shape, parts = (num_rows, num_cols), {name: codes, scale_name: scales}
    if scheme.group:
        want = [-(-num_rows // scheme.rows), -(-num_cols // scheme.group)]
        if list(scales.shape) != want:
            raise _misshapen(where, scale_name, scales, name, codes, str(want))
        return Fp8Tensor(name, shape, find_format("fp8_block"), parts, codes, scale_name, scheme.rows)
    size = math.prod(scales.shape)
    if size not in (1, num_rows):
        raise _misshapen(where, scale_name, scales, name, codes, f"one scale, or [{num_rows}, 1]")
    return Fp8Tensor(name, shape, find_format("fp8"), parts, codes, scale_name, num_rows if size == 1 else 1)


def _misshapen(
    where: object, scale_name: str, scales: StoredTensor, name: str, codes: StoredTensor, want: str
) -> ModelError:
    return ModelError(
        f"{where}: tensor {scale_name} has shape {list(scales.shape)}; {want} was expected for {name} of shape "
        f"{list(codes.shape)}"
    )
