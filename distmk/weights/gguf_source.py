"""GGUF files of the llama and qwen3 architectures, with plain or quantized weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.model.config import ModelConfig, build_config
from distmk.model.json_fields import Fields
from distmk.weights.checkpoint import check_tensors, expected_tensors
from distmk.weights.files import PLAIN_ENCODINGS, Bytes, DataFile, Encoding, FileCheckpoint, StoredTensor
from distmk.weights.gguf_header import ArrayRef, GgufHeader, GgufTensor, read_header
from distmk.weights.gguf_keys import check_keys
from distmk.weights.gguf_stop_tokens import stop_token_ids

ARCHITECTURES = ("llama", "qwen3")
QUANTIZED = (
    *("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL"),  # blocks of 32 elements
    *("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS"),  # of 256
)
"""Types that the gguf package decodes exactly as ggml does. llama-quantize mixes several in a file, and takes one with blocks
of 32 where a row is no multiple of 256."""
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
    """Open the GGUF file at `path`; ModelError for anything missing, damaged, or not supported."""
    header = read_header(path)
    _refuse_split(header)
    file = DataFile(path)
    types = _type_table()
    tensors: dict[str, StoredTensor] = {}
    factors: tuple[float, ...] | None = None
    arch = _architecture(header)
    located = [(entry, _locate(entry, types, file)) for entry in header.tensors]
    _check_data(header, [stored for _, stored in located], file)
    for entry, stored in located:
        if entry.name == ROPE_FACTORS and arch == "llama":  # llama.cpp applies them in this architecture only
            if math.prod(stored.shape) > MAX_ROPE_FACTORS:
                raise ModelError(f"{path}: tensor {ROPE_FACTORS} has shape {list(stored.shape)}, too large for factors")
            factors = tuple(stored.encoding.to_f32(file.read(stored.offset, stored.num_bytes)).tolist())
            continue
        name = hf_name(entry.name)
        if name in tensors:
            raise ModelError(f"{path}: tensor {entry.name} is there twice; fetch the file again")
        tensors[name] = stored
    config = config_from_header(header, factors)
    shapes = {name: t.shape for name, t in tensors.items()}
    notes = check_keys(header, _scalars(header), arch) + check_tensors(shapes, config, str(path))
    if arch == "llama":
        for name, t in tensors.items():
            if ".q_proj." in name or ".k_proj." in name:
                tensors[name] = StoredTensor(t.encoding, t.shape, t.file, t.offset, t.num_bytes, config.head_dim)
    return FileCheckpoint(config, path, [file], {name: tensors[name] for name in expected_tensors(config)}, notes)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned unchanged."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _IN_LAYER:
        return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{kind}"
    return f"{_OUTSIDE_LAYERS[stem]}.{kind}" if stem in _OUTSIDE_LAYERS else name


def read_gguf_config(path: Path) -> ModelConfig:
    """The config alone, for a run that needs no weights. ModelError as for `open_gguf`."""
    checkpoint = open_gguf(path)
    checkpoint.close()
    return checkpoint.config


def config_from_header(header: GgufHeader, rope_freq_factors: tuple[float, ...] | None) -> ModelConfig:
    """The config of a GGUF file's metadata and tensor table; ModelError if it is not supported.

    Biases and tied embeddings are not in the metadata: they follow from the tensors in the table.
    """
    arch = _architecture(header)
    where = str(header.path)
    f = _scalars(header)
    check_keys(header, f, arch)
    shapes = {t.name: t.shape for t in header.tensors}
    hidden, num_heads = f.integer(f"{arch}.embedding_length"), f.integer(f"{arch}.attention.head_count")
    if num_heads < 1:
        raise ModelError(f"{where}: {arch}.attention.head_count is {num_heads}; it must be at least 1")
    head_dim = f.integer(f"{arch}.attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if f.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise ModelError(
                f"{where}: {arch}.{key} is {f.integer(f'{arch}.{key}')}; only the head size, {head_dim}, is supported"
            )
    embedding = shapes.get("token_embd.weight")
    bos = f.integer("tokenizer.ggml.bos_token_id", -1)
    values: dict[str, Any] = {
        "family": arch,
        "hidden_size": hidden,
        "intermediate_size": f.integer(f"{arch}.feed_forward_length"),
        "num_layers": f.integer(f"{arch}.block_count"),
        "num_heads": num_heads,
        "num_kv_heads": f.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding[0] if embedding else f.integer(f"{arch}.vocab_size"),
        "max_position": f.integer(f"{arch}.context_length"),
        # Stored as float32; its shortest decimal form is what the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(f.number(f"{arch}.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(str(np.float32(f.number(f"{arch}.rope.freq_base", 10000.0)))),
        "rope_scaling": None,
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "o_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "qk_norm": arch == "qwen3",
        "bos_token_id": bos if bos >= 0 else None,
        "eos_token_ids": stop_token_ids(header, f),
        "rope_freq_factors": rope_freq_factors,
        "sliding_window": f.integer(f"{arch}.attention.sliding_window", 0) or None,
    }
    return build_config(values, where)


def _scalars(header: GgufHeader) -> Fields:
    return Fields({k: v for k, v in header.metadata.items() if not isinstance(v, ArrayRef)}, str(header.path))


def _architecture(header: GgufHeader) -> str:
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {arch!s} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(arch)


def _refuse_split(header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise ModelError(
            f"{header.path}: one of {count} parts of a split GGUF; merge them with llama-gguf-split --merge"
        )


def _type_table() -> Mapping[int, Encoding | str]:
    """By GGUF type number: its encoding, or its name if it is not supported."""
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


def _locate(t: GgufTensor, types: Mapping[int, Encoding | str], file: DataFile) -> StoredTensor:
    """The bytes of a tensor; ModelError if its type is not supported, or the file is too short."""
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
    return StoredTensor(encoding, t.shape, 0, t.offset, num_bytes)


def _check_data(header: GgufHeader, tensors: Sequence[StoredTensor], file: DataFile) -> None:
    """ModelError unless the tensors follow each other from the start of the data to the end of the file, each padded to the
    alignment, as ggml demands (`gguf_init_from_file`). Otherwise a size or an offset is wrong, and weights would be garbage.
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
