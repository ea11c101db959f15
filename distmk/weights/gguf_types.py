"""The types of GGUF tensors, plain and quantized, and the place of their blocks in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.weights.files import PLAIN_ENCODINGS, Bytes, DataFile, Encoding, StoredTensor
from distmk.weights.gguf_header import GgufHeader, GgufTensor

QUANTIZED = (
    *("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL"),  # blocks of 32 elements
    *("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS"),  # blocks of 256
)
"""Types that the gguf package decodes exactly as ggml does. llama-quantize mixes several types in a file. If a row is
not a multiple of 256, it uses a type with blocks of 32.
"""


def type_table() -> Mapping[int, Encoding | str]:
    """For each GGUF type number, its encoding, or its name if it is not supported."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    def encoding(kind: GGMLQuantizationType) -> Encoding:
        def decode(raw: Bytes) -> npt.NDArray[np.float32]:
            with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is reported by `FileCheckpoint`
                return np.asarray(dequantize(raw, kind), np.float32)

        return Encoding(kind.name, *GGML_QUANT_SIZES[kind], decode)

    table: dict[int, Encoding | str] = {}
    for kind in GGMLQuantizationType:
        if kind.name in QUANTIZED:
            table[kind.value] = encoding(kind)
        else:
            table[kind.value] = PLAIN_ENCODINGS.get(kind.name, kind.name)
    return table


def locate(t: GgufTensor, types: Mapping[int, Encoding | str], file: DataFile, number: int) -> StoredTensor:
    """The bytes of a tensor in file `number`. ModelError: its type is not supported, or the file is too short."""
    encoding = types.get(t.type_id, f"number {t.type_id}")
    if isinstance(encoding, str):
        supported = ", ".join((*PLAIN_ENCODINGS, *QUANTIZED))
        raise ModelError(f"{file.path}: tensor {t.name} has type {encoding}; supported are {supported}")
    if not t.shape or t.shape[-1] % encoding.block_elements:
        raise ModelError(
            f"{file.path}: tensor {t.name} has rows of {t.shape[-1] if t.shape else 0}; "
            f"{encoding.name} needs a multiple of {encoding.block_elements}"
        )
    num_bytes = math.prod(t.shape) // encoding.block_elements * encoding.block_bytes
    if t.offset + num_bytes > file.num_bytes:
        raise ModelError(
            f"{file.path}: cut short: has {file.num_bytes} bytes, but tensor {t.name} goes to byte "
            f"{t.offset + num_bytes}; fetch the file again"
        )
    return StoredTensor(encoding, t.shape, number, t.offset, num_bytes)


def check_data(header: GgufHeader, tensors: Sequence[StoredTensor], file: DataFile) -> None:
    """ModelError unless the tensors follow each other from the start of the data to the end of the file.

    Each tensor must be padded to the alignment, as ggml demands (`gguf_init_from_file`). Otherwise a size or an offset
    is wrong, and weights would be garbage.
    """
    expected = header.data_start
    for entry, tensor in zip(header.tensors, tensors, strict=True):
        if tensor.offset != expected:
            raise ModelError(
                f"{file.path}: damaged: the data of tensor {entry.name} begins at byte {tensor.offset}; "
                f"byte {expected}, behind the tensor before it, was expected; fetch the file again"
            )
        expected += -(-tensor.num_bytes // header.alignment) * header.alignment
    if tensors and file.num_bytes > expected:
        raise ModelError(
            f"{file.path}: damaged: has {file.num_bytes} bytes, but its tensors end at byte {expected}; "
            "fetch the file again"
        )
