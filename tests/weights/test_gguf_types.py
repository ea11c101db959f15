"""Quantized GGUF types that the gguf package reads but cannot write: random blocks, against its own decoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from support.gguf_files import SCALES, gguf_names, permute, random_blocks, write_gguf
from test_weights import compare, expect_error
from transformers import LlamaConfig, LlamaForCausalLM

from distmk.errors import ModelError
from distmk.weights import files, open_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
Blocks = dict[str, tuple[np.ndarray[Any, np.dtype[np.uint8]], QuantType]]


def mixed_model(path: Path, seed: int) -> tuple[dict[str, torch.Tensor], Blocks]:
    """Write a model whose matrices have all the types in turn; its weights as gguf decodes them, and the blocks."""
    torch.manual_seed(seed % (1 << 31))
    rng = np.random.default_rng(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    state, blocks, kinds = model.state_dict(), {}, list(SCALES)
    rng.shuffle(kinds)  # type: ignore[arg-type]
    for name in gguf_names(model.config, state):
        if state[name].ndim == 2:
            kind = kinds[len(blocks) % len(kinds)]
            blocks[name] = (random_blocks(tuple(state[name].shape), kind, rng), kind)
            values = gguf.dequantize(*blocks[name])
            heads = 8 if ".q_proj." in name else 4 if ".k_proj." in name else 0
            if heads:  # the inverse of the converter's permutation
                order = permute(np.arange(values.shape[0]), heads)
                values = values[np.argsort(order)]
            state[name] = torch.from_numpy(np.ascontiguousarray(values))
    write_gguf(path, model.config, state, blocks=blocks)
    return state, blocks


def test_reads_blocks_that_llama_quantize_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors, and slices that begin and end inside blocks; chunks of a few rows."""
    monkeypatch.setattr(files, "CHUNK_ELEMENTS", 5000)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    state, blocks = mixed_model(tmp_path / "m.gguf", seed)
    assert {kind for _, kind in blocks.values()} == set(SCALES)
    compare(open_checkpoint(tmp_path), state, seed)


@pytest.mark.filterwarnings("error")
def test_damaged_blocks(tmp_path: Path) -> None:
    """A file that ends inside a block, rows of a part of a block, a scale that is no number, and a type that is not supported."""
    path = tmp_path / "m.gguf"
    mixed_model(path, 1)
    data = path.read_bytes()
    last = max(gguf.GGUFReader(path).tensors, key=lambda t: t.data_offset)
    path.write_bytes(data[: last.data_offset + last.n_bytes - 3])
    expect_error(path, f"cut short: has {last.data_offset + last.n_bytes - 3} bytes, but tensor {last.name} goes to")

    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    state = LlamaForCausalLM(config).state_dict()
    rng, name = np.random.default_rng(2), "lm_head.weight"
    for kind, message in ((QuantType.Q6_K, "tensor a has rows of 384; Q6_K needs a multiple of 256"),
                          (QuantType.IQ4_XS, "tensor a has rows of 384; IQ4_XS needs a multiple of 256")):  # fmt: skip

        def add(w: gguf.GGUFWriter, kind: QuantType = kind) -> None:
            w.add_tensor("a", random_blocks((2, 512), kind, rng), raw_dtype=kind)
            w.tensors[-1]["a"].shape = (2, 384)

        write_gguf(path, config, state, edit=add)
        expect_error(path, message)
    bad = random_blocks((64, 256), QuantType.Q6_K, rng)
    bad[7, -2:] = np.array([np.inf], np.float16).view(np.uint8)
    write_gguf(path, config, state, blocks={name: (bad, QuantType.Q6_K)})
    with pytest.raises(ModelError, match=f"tensor {name} has weights that are NaN or infinite"):
        open_checkpoint(path).read(name)
    other = np.zeros((64, 66), np.uint8)
    write_gguf(path, config, state, blocks={name: (other, QuantType.IQ2_XXS)})
    expect_error(path, "tensor output.weight has type IQ2_XXS; supported are F32, F16, BF16, Q8_0, Q5_0", "IQ4_XS")
