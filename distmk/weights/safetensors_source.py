"""The weights of Hugging Face folders: one or more safetensors files.

The `safetensors` library checks each file. The data is then read at the offsets in its header, because the library's
numpy interface has no bfloat16 and its torch interface would import torch on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from distmk.errors import ModelError, one_line
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.user_files import is_folder
from distmk.weights.checkpoint import EMBEDDING, HEAD, check_tensors
from distmk.weights.files import (
    CHUNK_ELEMENTS,
    PLAIN_ENCODINGS,
    RAW_ENCODINGS,
    DataFile,
    FileCheckpoint,
    StoredTensor,
)
from distmk.weights.hf_config import generation_notes, read_hf_config, read_hf_quantization
from distmk.weights.quantization_config import Quantization
from distmk.weights.quantized_source import find_quantized
from distmk.weights.quantized_tensor import QuantizedTensor
from distmk.weights.shard_files import INDEX_FILE, find_shards
from distmk.weights.unused import is_buffer

META_EMBEDDING = "tok_embeddings.weight"


def open_safetensors(folder: Path) -> FileCheckpoint:
    """Open a Hugging Face folder. ModelError: something is missing, damaged, or not supported."""
    config, scheme = read_hf_config(folder / "config.json"), read_hf_quantization(folder / "config.json")
    files, tensors = _read_tables(folder)
    if META_EMBEDDING in tensors:
        raise ModelError(
            f"{files[0].path}: has the names of Meta's and Mistral's own format ({META_EMBEDDING}); "
            "fetch the weights in the Hugging Face format, or convert them with transformers"
        )
    quantized = find_quantized(expected_tensors(config), tensors, scheme, files)
    config, notes = _resolve_tie(config, folder, files, tensors)
    notes += generation_notes(folder)
    return _checkpoint(config, folder, files, tensors, notes, scheme, quantized)


def open_weights(config: ModelConfig, path: Path) -> FileCheckpoint:
    """Open the safetensors weights of `config`, in a folder or a file. ModelError: as for `open_safetensors`."""
    files, tensors = _read_tables(path)
    find_quantized(expected_tensors(config), tensors, None, files)
    return _checkpoint(config, path, files, tensors, ())


def _checkpoint(
    config: ModelConfig,
    path: Path,
    files: list[DataFile],
    tensors: Mapping[str, StoredTensor],
    notes: tuple[str, ...],
    scheme: Quantization | None = None,
    quantized: Mapping[str, QuantizedTensor] | None = None,
) -> FileCheckpoint:
    """A checkpoint of the tensors that `config` calls for.

    ModelError: they are missing, or other tensors would change the result.
    """
    quantized = quantized or {}
    shapes: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in tensors.items()}
    shapes |= {name: matrix.shape for name, matrix in quantized.items()}
    unused = check_tensors(shapes, config, str(path))
    kept = {name: tensors[name] for name in expected_tensors(config) if name not in quantized}
    method = scheme.method if scheme and quantized else None
    return FileCheckpoint(config, path, files, kept, notes + unused, method, quantized)


def _read_tables(folder: Path) -> tuple[list[DataFile], dict[str, StoredTensor]]:
    """The safetensors files of a folder, or the one file at that path, and all their tensors."""
    shards, promised = find_shards(folder) if is_folder(folder) else ([folder], {})
    files: list[DataFile] = []
    tensors: dict[str, StoredTensor] = {}
    for number, path in enumerate(shards):
        file = DataFile(path)
        files.append(file)
        for name, tensor in _read_table(file, number).items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is already in {shards[tensors[name].file].name}")
            tensors[name] = tensor
    for name, shard in promised.items():
        if name not in tensors or shards[tensors[name].file].name != shard:
            raise ModelError(f"{folder / INDEX_FILE}: puts tensor {name} in {shard}, which does not hold it")
    return files, tensors


def _resolve_tie(
    config: ModelConfig, folder: Path, files: Sequence[DataFile], tensors: dict[str, StoredTensor]
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config with the tie that transformers would load, and notes for the user. `tensors` is changed accordingly.

    `PreTrainedModel.tie_weights` ties symmetrically if only one of the two tensors is stored, and does not tie if both
    are stored and differ, whatever the config says.
    """
    if not config.tie_embeddings or HEAD not in tensors:
        return config, ()
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = tensors.pop(HEAD)
        return config, ()
    untied = replace(config, tie_embeddings=False)
    check_tensors({name: t.shape for name, t in tensors.items()}, untied, str(folder))
    both = FileCheckpoint(untied, folder, files, {name: tensors[name] for name in (EMBEDDING, HEAD)})
    step = max(1, CHUNK_ELEMENTS // config.hidden_size)
    for begin in range(0, config.vocab_size, step):
        rows = slice(begin, min(begin + step, config.vocab_size))
        if not np.array_equal(both.read(EMBEDDING, rows), both.read(HEAD, rows)):
            note = f"{folder}: {HEAD} is used: it differs from {EMBEDDING}, though the config says tie_word_embeddings"
            return untied, (note,)
    del tensors[HEAD]
    return config, ()


def _read_table(file: DataFile, number: int) -> dict[str, StoredTensor]:
    """The tensors of one file without buffers.

    The safetensors library checks offsets, sizes, overlaps and the file's length.

    The format: 8 bytes of header length (little endian), the header as JSON, then the data that its offsets are
    relative to; see https://huggingface.co/docs/safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file.path), framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as e:
        raise ModelError(f"{file.path}: damaged or cut short ({one_line(e)}); fetch the file again") from None
    header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little")
    header = json.loads(file.read(8, header_bytes).tobytes())
    header.pop("__metadata__", None)
    table = {}
    for name, entry in header.items():
        if is_buffer(name):
            continue
        dtype = entry["dtype"]
        encoding = PLAIN_ENCODINGS.get(dtype) or RAW_ENCODINGS.get(dtype)
        if encoding is None:
            raise ModelError(
                f"{file.path}: tensor {name} has dtype {dtype}; supported are {', '.join(PLAIN_ENCODINGS)}"
            )
        start, stop = entry["data_offsets"]
        table[name] = StoredTensor(encoding, tuple(entry["shape"]), number, 8 + header_bytes + start, stop - start)
    return table
