"""Opens GGUF files of the architectures in `FAMILIES`, with plain or quantized weights, whole or split."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from distmk.errors import ModelError
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.weights.checkpoint import check_tensors
from distmk.weights.files import PLAIN_ENCODINGS, DataFile, FileCheckpoint, StoredTensor
from distmk.weights.gguf_config import config_of
from distmk.weights.gguf_families import GgufFamily, family_of
from distmk.weights.gguf_header import GgufHeader, GgufTensor
from distmk.weights.gguf_keys import check_keys, check_pre_tokenizer
from distmk.weights.gguf_metadata import ArchMetadata
from distmk.weights.gguf_parts import read_parts
from distmk.weights.gguf_tensor import find_packed
from distmk.weights.gguf_types import check_data, locate, type_table

MAX_ROPE_FACTORS = 1 << 16


def open_gguf(path: Path) -> FileCheckpoint:
    """Open the GGUF file at `path`, or the split file that it is a part of.

    ModelError: something is missing, damaged, or not supported.
    """
    parts = read_parts(path)
    header = replace(parts[0], tensors=tuple(entry for part in parts for entry in part.tensors))
    arch, family = family_of(header)
    metadata = ArchMetadata(header, arch)
    files = [DataFile(part.path) for part in parts]
    tensors: dict[str, StoredTensor] = {}
    factors: dict[str, tuple[float, ...]] = {}
    for entry, stored in _located(parts, files):
        if entry.name.removesuffix(".weight") in family.rope_factors:
            factors[entry.name.removesuffix(".weight")] = _rope_factors(entry.name, stored, files[stored.file])
            continue
        name = family.hf_name(entry.name)
        if name in tensors:
            raise ModelError(f"{files[stored.file].path}: tensor {entry.name} is there twice; fetch the file again")
        tensors[name] = stored
    config = config_of(metadata, family, factors)
    notes = check_keys(metadata, family) + check_pre_tokenizer(header)
    notes += check_tensors({name: t.shape for name, t in tensors.items()}, config, str(header.path))
    needed = {name: _as_written(name, tensors[name], family, config) for name in expected_tensors(config)}
    packed = find_packed(needed)
    method = "gguf" if any(t.encoding.name not in PLAIN_ENCODINGS for t in needed.values()) else None
    return FileCheckpoint(config, header.path, files, needed, notes, method, packed)


def _as_written(name: str, stored: StoredTensor, family: GgufFamily, config: ModelConfig) -> StoredTensor:
    """The tensor, with a note of the changes that the converter made to it."""
    if family.permutes_heads and (".q_proj." in name or ".k_proj." in name):
        return replace(stored, swizzled_head=config.head_dim)
    return replace(stored, shift=family.norm_shift) if name.endswith("norm.weight") else stored


def _located(parts: list[GgufHeader], files: list[DataFile]) -> list[tuple[GgufTensor, StoredTensor]]:
    """Every tensor of every part, and the place of its bytes. ModelError: a part is damaged."""
    types = type_table()
    located: list[tuple[GgufTensor, StoredTensor]] = []
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        stored = [locate(entry, types, file, number) for entry in part.tensors]
        check_data(part, stored, file)
        located += zip(part.tensors, stored, strict=True)
    return located


def _rope_factors(name: str, stored: StoredTensor, file: DataFile) -> tuple[float, ...]:
    if math.prod(stored.shape) > MAX_ROPE_FACTORS:
        raise ModelError(f"{file.path}: tensor {name} has shape {list(stored.shape)}, too large for factors")
    return tuple(stored.encoding.to_f32(file.read(stored.offset, stored.num_bytes)).tolist())


def read_gguf_config(path: Path) -> tuple[ModelConfig, Path]:
    """Only the config, for a run that needs no weights, and the file with the metadata. ModelError: as for `open_gguf`."""
    checkpoint = open_gguf(path)
    checkpoint.close()
    return checkpoint.config, checkpoint.path or path
