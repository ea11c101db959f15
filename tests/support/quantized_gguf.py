"""GGUF files with a type for each matrix, as llama-quantize writes them, and the models that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as QuantType
from support import families, tiny
from support.gguf_files import CONVERSIONS, SCALES, permute, random_blocks, write_gguf
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WRITABLE = (QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1)
Blocks = npt.NDArray[np.uint8]


def write_quantized(
    path: Path, family: str, kinds: Mapping[str, QuantType], seed: int, **changes: Any
) -> PreTrainedModel:
    """A model whose matrices have the values of the file, in float32. kinds: by a part of the name; others are Q8_0."""
    changes = {**SIZES, **changes}
    model = tiny.make("qwen3", seed, **changes) if family == "qwen3" else families.make(family, seed, **changes)
    conversion, config, rng = CONVERSIONS[model.config.model_type], model.config, np.random.default_rng(seed)
    blocks = {}
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        kind = next((kind for part, kind in kinds.items() if part in name), QuantType.Q8_0)
        stored = blocks_of(weight.data.float().numpy(), kind, rng)
        weight.data = torch.from_numpy(gguf.dequantize(stored, kind).copy())
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and conversion.permutes:
                stored = stored[permute(np.arange(len(stored), dtype=np.float32)[:, None], heads)[:, 0].astype(int)]
        blocks[name] = (stored, kind)
    write_gguf(path, config, model.state_dict(), blocks=blocks)
    return model


def blocks_of(values: npt.NDArray[np.float32], kind: QuantType, rng: np.random.Generator) -> Blocks:
    """The values as blocks; for a type that the package cannot write, random blocks of values as large."""
    if kind in WRITABLE:
        return np.asarray(gguf.quantize(values, kind))
    blocks = random_blocks(values.shape, kind, rng)
    factor = values.std() / gguf.dequantize(blocks, kind).std()
    in_blocks = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    at, count = SCALES[kind]
    begin = at * 2 % in_blocks.shape[1]
    halves = np.ascontiguousarray(in_blocks[:, begin : begin + 2 * count]).view(np.float16)
    in_blocks[:, begin : begin + 2 * count] = (halves.astype(np.float32) * factor).astype(np.float16).view(np.uint8)
    return blocks
