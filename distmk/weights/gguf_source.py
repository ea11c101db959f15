"""GGUF files of the llama, qwen2 and qwen3 architectures, with plain or quantized weights, whole or split."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from distmk.errors import ModelError
from distmk.model.config import ModelConfig
from distmk.models import expected_tensors
from distmk.weights.checkpoint import check_tensors
from distmk.weights.files import DataFile, FileCheckpoint, StoredTensor
from distmk.weights.gguf_config import architecture, config_from_header
from distmk.weights.gguf_header import GgufHeader, GgufTensor
from distmk.weights.gguf_keys import check_keys, check_pre_tokenizer
from distmk.weights.gguf_parts import read_parts, scalars
from distmk.weights.gguf_types import check_data, locate, type_table

ROPE_FACTORS = "rope_freqs.weight"
MAX_ROPE_FACTORS = 1 << 16

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> FileCheckpoint:
    """Open the GGUF file at `path`, or the split file that it is a part of; ModelError for anything missing, damaged, or not
    supported.
    """
    parts = read_parts(path)
    header = replace(parts[0], tensors=tuple(entry for part in parts for entry in part.tensors))
    arch = architecture(header)
    files = [DataFile(part.path) for part in parts]
    tensors: dict[str, StoredTensor] = {}
    factors: tuple[float, ...] | None = None
    for entry, stored in _located(parts, files):
        if entry.name == ROPE_FACTORS and arch == "llama":  # llama.cpp applies them in this architecture only
            factors = _rope_factors(stored, files[stored.file])
            continue
        name = hf_name(entry.name)
        if name in tensors:
            raise ModelError(f"{files[stored.file].path}: tensor {entry.name} is there twice; fetch the file again")
        tensors[name] = stored
    config = config_from_header(header, factors)
    shapes = {name: t.shape for name, t in tensors.items()}
    notes = check_keys(header, scalars(header), arch) + check_pre_tokenizer(header)
    notes += check_tensors(shapes, config, str(header.path))
    if arch == "llama":
        for name, t in tensors.items():
            if ".q_proj." in name or ".k_proj." in name:
                tensors[name] = replace(t, swizzled_head=config.head_dim)
    return FileCheckpoint(config, header.path, files, {name: tensors[name] for name in expected_tensors(config)}, notes)


def _located(parts: list[GgufHeader], files: list[DataFile]) -> list[tuple[GgufTensor, StoredTensor]]:
    """Every tensor of every part, and its bytes. ModelError: a part is damaged."""
    types = type_table()
    found: list[tuple[GgufTensor, StoredTensor]] = []
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        stored = [locate(entry, types, file, number) for entry in part.tensors]
        check_data(part, stored, file)
        found += zip(part.tensors, stored, strict=True)
    return found


def _rope_factors(stored: StoredTensor, file: DataFile) -> tuple[float, ...]:
    if math.prod(stored.shape) > MAX_ROPE_FACTORS:
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} has shape {list(stored.shape)}, too large for factors")
    return tuple(stored.encoding.to_f32(file.read(stored.offset, stored.num_bytes)).tolist())


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned unchanged."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _IN_LAYER:
        return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{kind}"
    return f"{_OUTSIDE_LAYERS[stem]}.{kind}" if stem in _OUTSIDE_LAYERS else name


def read_gguf_config(path: Path) -> tuple[ModelConfig, Path]:
    """The config alone, for a run that needs no weights, and the file with the metadata. ModelError as for `open_gguf`."""
    checkpoint = open_gguf(path)
    checkpoint.close()
    return checkpoint.config, checkpoint.path or path
