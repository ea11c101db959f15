"""Small GGUF files for tests, written with the gguf package as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as QuantType

Edit = Callable[[gguf.GGUFWriter], object]


def _llama(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)


def _mistral(w: gguf.GGUFWriter, c: Any) -> None:
    """With the key of a window, which not every version of the converter writes."""
    _llama(w, c)
    if c.sliding_window:
        w.add_sliding_window(c.sliding_window)


def _qwen2(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])


def _gemma2(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_attn_logit_softcapping(c.attn_logit_softcapping)
    w.add_final_logit_softcapping(c.final_logit_softcapping)
    w.add_sliding_window(c.sliding_window)


def _gemma3(w: gguf.GGUFWriter, c: Any) -> None:
    full, local = c.rope_parameters["full_attention"], c.rope_parameters["sliding_attention"]
    if full["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(full["factor"])
    w.add_rope_freq_base(full["rope_theta"])
    w.add_rope_freq_base_swa(local["rope_theta"])
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    if "sliding_attention" in c.layer_types:
        w.add_sliding_window(c.sliding_window)


def _granite(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    w.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    w.add_attention_scale(c.attention_multiplier)
    w.add_embedding_scale(c.embedding_multiplier)
    w.add_residual_scale(c.residual_multiplier)
    w.add_logit_scale(c.logits_scaling)


def _phi3(w: gguf.GGUFWriter, c: Any) -> None:
    rope = c.rope_parameters
    original = c.original_max_position_embeddings
    w.add_rope_dimension_count(int(rope["partial_rotary_factor"] * c.hidden_size) // c.num_attention_heads)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_scaling_orig_ctx_len(original)
    w.add_sliding_window(c.sliding_window or 0)
    if "long_factor" in rope:
        longer = c.max_position_embeddings / original
        w.add_rope_scaling_attn_factors((1 + np.log(longer) / np.log(original)) ** 0.5)
        for name in ("long", "short"):
            w.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _smollm3(w: gguf.GGUFWriter, c: Any) -> None:
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    w.add_rope_dimension_count(c.head_dim)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)


class Conversion(NamedTuple):
    """What llama.cpp's converter (`conversion/`) makes of a model type: architecture, its own metadata, and whether it permutes
    the rows of Q and K; `shift` is added to the weights of norms.
    """

    arch: str
    add_metadata: Callable[[gguf.GGUFWriter, Any], None]
    permutes: bool = False
    shift: float = 0.0


CONVERSIONS = {
    "llama": Conversion("llama", _llama, permutes=True),
    "mistral": Conversion("llama", _mistral, permutes=True),
    "qwen2": Conversion("qwen2", _qwen2),
    "qwen3": Conversion("qwen3", _llama),
    "phi3": Conversion("phi3", _phi3),
    "gemma2": Conversion("gemma2", _gemma2, shift=1.0),
    "gemma3_text": Conversion("gemma3", _gemma3, shift=1.0),
    "granite": Conversion("granite", _granite, permutes=True),
    "smollm3": Conversion("smollm3", _smollm3, permutes=True),
}


def gguf_names(config: Any, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The GGUF name of every tensor, from the gguf package's own table."""
    arch_name = CONVERSIONS[config.model_type].arch
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in state}
    return {name: found for name, found in names.items() if found}


def permute(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = weights.shape
    return weights.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


SCALES: Mapping[QuantType, tuple[int, int]] = {
    **dict.fromkeys((QuantType.Q4_0, QuantType.Q5_0, QuantType.Q8_0, QuantType.IQ4_NL, QuantType.IQ4_XS), (0, 1)),
    **dict.fromkeys((QuantType.Q4_1, QuantType.Q5_1, QuantType.Q4_K, QuantType.Q5_K), (0, 2)),
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
    config: Any,
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
    conversion = CONVERSIONS[config.model_type]
    w = gguf.GGUFWriter(path, conversion.arch, split_max_tensors=max_tensors)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    conversion.add_metadata(w, config)
    for name, stored in gguf_names(config, state).items():
        if stored == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if blocks and name in blocks:
            w.add_tensor(stored, blocks[name][0], raw_dtype=blocks[name][1])
            continue
        data = state[name].float().numpy()
        if conversion.permutes and ".q_proj." in name:
            data = permute(data, config.num_attention_heads)
        if conversion.permutes and ".k_proj." in name:
            data = permute(data, config.num_key_value_heads)
        if data.ndim == 1:
            w.add_tensor(stored, data + np.float32(conversion.shift) if name.endswith("norm.weight") else data)
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
