"""Reads blocks of tensors from files with bounded memory: the part that safetensors and GGUF share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.formats import QuantizedRows
from distmk.model.bf16 import F32, I32, U16, all_finite, bf16_to_f32, f32_to_bf16
from distmk.model.config import ModelConfig
from distmk.user_files import open_regular
from distmk.weights.checkpoint import EMBEDDING, HEAD, bounds
from distmk.weights.quantized_tensor import QuantizedTensor

CHUNK_ELEMENTS = 1 << 19
"""Elements converted at a time: 2 MiB as float32, little compared with a rank's weights."""

SAMPLE_BYTES = 4096  # size of each sampled block of a file for the fingerprint
NUM_SAMPLES = 16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Encoding:
    """How elements are stored: `block_elements` of a row take `block_bytes`.

    `decode`: from uint8 [rows, n * block_bytes], C-contiguous, to [rows, n * block_elements] of bfloat16 bits if `is_bf16`,
    else of float32.
    """

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[Bytes], npt.NDArray[np.generic]]
    is_bf16: bool = False

    def to_f32(self, raw: Bytes) -> F32:
        """The elements of a row, from its bytes; exact."""
        values = self.decode(raw.reshape(1, -1))[0]
        return bf16_to_f32(values.astype(np.uint16)) if self.is_bf16 else values.astype(np.float32)


PLAIN_ENCODINGS: Mapping[str, Encoding] = {
    "F32": Encoding("F32", 1, 4, lambda raw: raw.view("<f4")),
    "F16": Encoding("F16", 1, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    "BF16": Encoding("BF16", 1, 2, lambda raw: raw.view("<u2"), is_bf16=True),
}


RAW_ENCODINGS: Mapping[str, Encoding] = {
    "F8_E4M3": Encoding("F8_E4M3", 1, 1, lambda raw: raw),
    "I32": Encoding("I32", 1, 4, lambda raw: raw.view("<i4")),
    "I64": Encoding("I64", 1, 8, lambda raw: raw.view("<i8")),
}
"""Of tensors that are only a part of a matrix."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `num_bytes` of file number `file`, beginning at byte `offset`, row after row.

    `swizzled_head`: the head size of a tensor whose rows are permuted within each head (see `stored_rows`), else 0.
    `shift`: the number that the converter added to the elements of a vector.
    """

    encoding: Encoding
    shape: tuple[int, ...]
    file: int
    offset: int
    num_bytes: int
    swizzled_head: int = 0
    shift: float = 0.0


def stored_rows(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """The rows at which llama.cpp's converter stores the Hugging Face `rows` of a Q or K projection (int64, any shape).

    `LlamaModel.permute` in llama.cpp's `convert_hf_to_gguf.py` interleaves the two halves of each head: pairs
    (i, i + head_dim / 2), which rotate together, become pairs (2i, 2i + 1).
    """
    within = rows % head_dim
    half = head_dim // 2
    return rows - within + 2 * (within % half) + within // half


class DataFile:
    """An open file, read by position.

    The file is not memory-mapped: mapped pages would count as the rank's memory, and a file that shrinks while it is
    mapped would kill the process instead of raising an error.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`. ModelError: it is not a regular file, or cannot be read."""
        self.path = path
        self._fd = -1
        self._fd = open_regular(path)
        self.num_bytes = os.fstat(self._fd).st_size

    def read(self, offset: int, num_bytes: int, out: Bytes | None = None) -> Bytes:
        """uint8 [num_bytes] from byte `offset`, in `out` if it is given. ModelError: the file is too short, or closed."""
        if self._fd < 0:
            raise ModelError(f"{self.path}: the checkpoint was closed; open it again to read from it")
        if out is None:
            out = np.empty(num_bytes, np.uint8)
        view = memoryview(out)  # type: ignore[arg-type]  # numpy declares the buffer protocol for Python 3.12 only
        done = 0
        while done < num_bytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise ModelError(f"{self.path}: reading at byte {offset + done} failed: {e.strerror}") from None
            if got == 0:
                raise ModelError(
                    f"{self.path}: cut short: ends at byte {offset + done}, "
                    f"but bytes up to {offset + num_bytes} were expected; fetch the file again"
                )
            done += got
        return out

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class FileCheckpoint:
    """A `Checkpoint` of tensors stored in files; several threads may read at once.

    tensors: read as bfloat16 or float32. quantized: matrices that can be read in their weight format; those that are
    not in `tensors`, too, are bfloat16 by their values.
    """

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        files: Sequence[DataFile],
        tensors: Mapping[str, StoredTensor],
        notes: tuple[str, ...] = (),
        quantization: str | None = None,
        quantized: Mapping[str, QuantizedTensor] | None = None,
    ) -> None:
        self.config = config
        self.quantization = quantization
        self.notes = notes
        self.path: Path | None = path
        self._where = path
        self._files = files
        self._tensors, self._quantized = dict(tensors), dict(quantized or {})
        parts = {part: stored for matrix in self._quantized.values() for part, stored in matrix.parts.items()}
        self.fingerprint = _fingerprint(config, files, {**tensors, **parts})
        if config.tie_embeddings:
            stored: tuple[dict[str, Any], ...] = (self._tensors, self._quantized)
            for known in stored:
                if EMBEDDING in known:
                    known[HEAD] = known[EMBEDDING]

    def has(self, name: str) -> bool:
        return name in self._tensors or name in self._quantized

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None, out: U16 | None = None) -> U16:
        if name in self._quantized and name not in self._tensors:
            return self._read_dequantized(name, rows, cols, out)
        tensor = self._tensor(name, num_dims=2)
        row_start, row_stop = bounds(rows, tensor.shape[0], f"{name} rows")
        col_start, col_stop = bounds(cols, tensor.shape[1], f"{name} columns")
        encoding = tensor.encoding
        first_block = col_start // encoding.block_elements
        last_block = -(-col_stop // encoding.block_elements)
        in_blocks = slice(
            col_start - first_block * encoding.block_elements, col_stop - first_block * encoding.block_elements
        )
        block_bytes = slice(first_block * encoding.block_bytes, last_block * encoding.block_bytes)
        if out is None:
            out = np.empty((row_stop - row_start, col_stop - col_start), np.uint16)
        if out.size == 0:
            return out
        if encoding.is_bf16 and out.shape[1] == tensor.shape[1] and not tensor.swizzled_head and out.flags.c_contiguous:
            first_byte = tensor.offset + row_start * 2 * tensor.shape[1]
            self._files[tensor.file].read(first_byte, out.nbytes, out.reshape(-1).view(np.uint8))
            self._check_finite(name, out.reshape(-1))
            return out
        step = max(1, tensor.swizzled_head, CHUNK_ELEMENTS // tensor.shape[1])
        for start in range(row_start, row_stop, step):
            stop = min(start + step, row_stop)
            values = encoding.decode(
                np.ascontiguousarray(read_raw_rows(self._files, tensor, start, stop)[:, block_bytes])
            )
            values = values[:, in_blocks]
            block = values if encoding.is_bf16 else f32_to_bf16(values)  # type: ignore[arg-type]
            out[start - row_start : stop - row_start] = block
            self._check_finite(name, np.ascontiguousarray(block).reshape(-1).view(np.uint16))
        return out

    @property
    def formats(self) -> Mapping[str, str]:
        return {name: matrix.format.name for name, matrix in self._quantized.items()}

    def read_quantized(self, name: str, rows: slice, cols: slice) -> QuantizedRows:
        matrix = self._quantized[name]
        row_range, col_range = (bounds(part, size, name) for part, size in zip((rows, cols), matrix.shape, strict=True))
        return matrix.read(self._files, row_range, col_range)

    def read_order(self, name: str) -> I32:
        order = self._quantized[name].order
        assert order is not None
        return order

    def _read_dequantized(self, name: str, rows: slice | None, cols: slice | None, out: U16 | None) -> U16:
        matrix = self._quantized[name]
        (row_start, row_stop), col_range = bounds(rows, matrix.shape[0], name), bounds(cols, matrix.shape[1], name)
        if out is None:
            out = np.empty((row_stop - row_start, col_range[1] - col_range[0]), np.uint16)
        step = max(1, CHUNK_ELEMENTS // matrix.shape[1])
        for start in range(row_start, row_stop, step):
            stop = min(start + step, row_stop)
            out[start - row_start : stop - row_start] = matrix.read_bf16(self._files, (start, stop), col_range)
        return out

    def read_vector(self, name: str) -> F32:
        tensor = self._tensor(name, num_dims=1)
        vector = tensor.encoding.to_f32(self._files[tensor.file].read(tensor.offset, tensor.num_bytes))
        if not np.isfinite(vector).all():
            raise self._not_finite(name)
        if tensor.swizzled_head:
            vector = vector[stored_rows(np.arange(vector.size), tensor.swizzled_head)]
        return vector - np.float32(tensor.shift) if tensor.shift else vector

    def _check_finite(self, name: str, bits: U16) -> None:
        """ModelError if one of the bfloat16 `bits` [n] is NaN or infinite."""
        if not all_finite(bits):
            raise self._not_finite(name)

    def _not_finite(self, name: str) -> ModelError:
        return ModelError(
            f"{self._where}: tensor {name} has weights that are NaN or infinite, or too large for bfloat16; "
            "fetch the model again, or a version that was saved without them"
        )

    def _tensor(self, name: str, num_dims: int) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._where}: no tensor {name}; it holds {len(self._tensors)} others")
        if len(tensor.shape) != num_dims:
            raise ModelError(f"{self._where}: tensor {name} has shape {list(tensor.shape)}; {num_dims}-D was expected")
        return tensor


def read_raw_rows(files: Sequence[DataFile], tensor: StoredTensor, start: int, stop: int) -> Bytes:
    """The stored bytes of rows [start, stop), in Hugging Face order: uint8 [stop - start, bytes of a row]."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    first, last = start, stop
    if tensor.swizzled_head:
        # Rows are permuted within a head, so whole heads contain them all.
        first = start // tensor.swizzled_head * tensor.swizzled_head
        last = -(-stop // tensor.swizzled_head) * tensor.swizzled_head
    raw = files[tensor.file].read(tensor.offset + first * row_bytes, (last - first) * row_bytes)
    raw = raw.reshape(last - first, row_bytes)
    return raw[stored_rows(np.arange(start, stop), tensor.swizzled_head) - first] if tensor.swizzled_head else raw


def _fingerprint(config: ModelConfig, files: Sequence[DataFile], tensors: Mapping[str, StoredTensor]) -> str:
    """sha256 over the config, the tensor table, and the size and evenly spaced blocks of each file."""
    digest = hashlib.sha256(config_text(config).encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.encoding.name} {t.shape} {t.file} {t.offset} {t.swizzled_head}\n".encode())
    for file in files:
        digest.update(f"{file.num_bytes}\n".encode())
        last = max(0, file.num_bytes - SAMPLE_BYTES)
        for i in range(NUM_SAMPLES + 1):
            digest.update(file.read(last * i // NUM_SAMPLES, min(SAMPLE_BYTES, file.num_bytes)).tobytes())
    return digest.hexdigest()


def config_text(config: ModelConfig) -> str:
    """The config as text; equal configs have equal texts."""
    return "\n".join(f"{key} {value!r}" for key, value in asdict(config).items())
