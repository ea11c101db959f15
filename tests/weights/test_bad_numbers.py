"""Numbers of a model that are out of range, and weights that are none: one line that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make
from support.gguf_files import write_gguf
from test_weights import edit_config, expect_error, tiny

from distmk.errors import ModelError
from distmk.weights import open_checkpoint

BAD: list[tuple[str, Any]] = [
    *(("eos_token_id", value) for value in (1 << 31, 1 << 63, 10**40, -1, 1.5, True, [2, 1 << 31], [[2]], {}, "2")),
    *(("rope_theta", value) for value in (1e-300, 0, -1, 1e300, float("nan"), float("inf"), True, "1", 10**400)),
    *(("rms_norm_eps", value) for value in (1e300, 1e-300, 0, -1, float("nan"), [1])),
    *(
        (name, value)
        for name in ("vocab_size", "head_dim", "num_hidden_layers")
        for value in (1 << 31, 0, -1, 2.5, "9")
    ),
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("key", "value"), BAD, ids=str)
def test_numbers_of_a_config(key: str, value: Any, tmp_path: Path) -> None:
    tiny("llama").config.save_pretrained(tmp_path)
    changes = {key: value} | ({"rope_parameters": None} if key == "rope_theta" else {})
    edit_config(tmp_path, **changes)
    expect_error(tmp_path, "config.json: ", load_format="dummy")


@pytest.mark.parametrize("value", [0, -2.0])
def test_divisor_of_logits(value: float, tmp_path: Path) -> None:
    make("granite", 0).config.save_pretrained(tmp_path)
    edit_config(tmp_path, logits_scaling=value, architectures=["GraniteForCausalLM"])
    expect_error(tmp_path, f"logits_scaling is {value:g}; it must be positive", load_format="dummy")


@pytest.mark.parametrize("value", [1 << 31, -1, [1 << 40], "x"])
def test_end_tokens_of_a_generation_config(value: Any, tmp_path: Path) -> None:
    tiny("llama").config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value!r}}}'.replace("'", '"'))
    expect_error(tmp_path, "generation_config.json: eos_token_id is", "below 2**31", load_format="dummy")


def test_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    """2**32 - 1 is llama.cpp's way to say none."""
    model, path = tiny("llama"), tmp_path / "m.gguf"
    write_gguf(path, model.config, model.state_dict(), edit=lambda w: w.add_eos_token_id(1 << 31))
    expect_error(path, "m.gguf: token id 2147483648 is none")
    write_gguf(path, model.config, model.state_dict(), edit=lambda w: w.add_eos_token_id((1 << 32) - 1))
    assert open_checkpoint(path).config.eos_token_ids == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """The last element of a matrix, and one of a vector."""
    tiny("llama").to(dtype).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    matrix, vector = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors[matrix][-1, -1] = tensors[vector][3] = value
    save_file(tensors, path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=f"tensor {matrix} has weights that are NaN or infinite"):
        checkpoint.read(matrix)
    with pytest.raises(ModelError, match=f"tensor {vector} has weights that are NaN or infinite"):
        checkpoint.read_vector(vector)
    assert np.isfinite(checkpoint.read_vector("model.layers.0.input_layernorm.weight")).all()
