"""Small GGUF files for tests, written with the gguf package as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as QuantType
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

AnyConfig = LlamaConfig | Qwen2Config | Qwen3Config
Edit = Callable[[gguf.GGUFWriter], object]


def arch_of(config: AnyConfig) -> str:
    return str(config.model_type)


def gguf_names(config: AnyConfig, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The GGUF name of every tensor, from the gguf package's own table."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_of(config))
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in state}
    return {name: found for name, found in names.items() if found}


def permute(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = weights.shape
    return weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


SCALES: Mapping[QuantType, tuple[int, int]] = {
    **dict.fromkeys((QuantType.Q5_0, QuantType.IQ4_NL, QuantType.IQ4_XS), (0, 1)),
    **dict.fromkeys((QuantType.Q5_1, QuantType.Q4_K, QuantType.Q5_K), (0, 2)),
    **dict.fromkeys((QuantType.Q3_K, QuantType.Q6_K), (-1, 1)),
    QuantType.Q2_K: (-2, 2),
}
"""By type: where in a block its float16 scales are, in units of 2 bytes, and how many."""


def random_blocks(shape: tuple[int, ...], kind: QuantType, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A matrix of valid blocks: any bits, but for scales that are ordinary numbers. gguf cannot write most of these types."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, num_bytes), np.uint8)
    at, count = SCALES[kind]
    begin = at * 2 % num_bytes
    scales = rng.uniform(-0.01, 0.01, (*blocks.shape[:2], count)).astype(np.float16)
    blocks[..., begin : begin + 2 * count] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    config: AnyConfig,
    state: Mapping[str, torch.Tensor],
    kind: QuantType = QuantType.F32,
    edit: Edit | None = None,
    drop: str = "",
    blocks: Mapping[str, tuple[npt.NDArray[np.uint8], QuantType]] | None = None,
    max_tensors: int = 0,
) -> None:
    """Write a model: matrices as `kind`, vectors as F32. `edit` may add metadata or tensors, `drop` is left out.

    `max_tensors`: in a part of a split file, 0 for a whole one.
    `blocks`: by Hugging Face name, matrices that are quantized already, and their type; Q and K of llama are stored as they are.
    """
    arch = arch_of(config)
    w = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    if arch != "qwen2":
        w.add_key_length(config.head_dim)
        w.add_value_length(config.head_dim)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    w.add_vocab_size(config.vocab_size)
    for name, stored in gguf_names(config, state).items():
        if stored == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if blocks and name in blocks:
            w.add_tensor(stored, blocks[name][0], raw_dtype=blocks[name][1])
            continue
        data = state[name].float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = permute(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = permute(data, config.num_key_value_heads)
        if data.ndim == 1:
            w.add_tensor(stored, data)
        else:
            w.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
    if edit:
        edit(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_tokenizer(path: Path, model: str, tokens: Sequence[str], arch: str = "llama", **settings: Any) -> Path:
    """Write a file that has nothing but a tokenizer. `settings`: of `tokenizer.ggml.*`, with "." spelled "__" in names."""
    w = gguf.GGUFWriter(path, arch)
    w.add_tokenizer_model(model)
    w.add_token_list(list(tokens))
    add = {bool: w.add_bool, int: w.add_uint32, str: w.add_string}
    for name, value in settings.items():
        key = f"tokenizer.ggml.{name.replace('__', '.')}"
        add.get(type(value), w.add_array)(key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path
