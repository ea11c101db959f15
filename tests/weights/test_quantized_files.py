"""Quantized safetensors files: every kind is read as its tools mean it, in any block, and what cannot be read is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.quantized_files import KINDS, SIZES, edit_config, edit_tensors, is_linear, save_quantized
from torch import Tensor

from distmk.errors import ModelError
from distmk.formats import find_format
from distmk.model.bf16 import torch_to_bf16
from distmk.weights import open_checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_reads(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    model = tiny.make("qwen3", int(rng.integers(1 << 30)), **SIZES)
    save_quantized(model, tmp_path, KINDS[kind], skip=lambda name: "layers.1.mlp" in name)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantization == KINDS[kind].config["quant_method"]
    parameters = {name: weight.data.float() for name, weight in model.named_parameters()}
    linear = {name for name in parameters if is_linear(name)}
    assert dict(checkpoint.formats) == {name: KINDS[kind].format for name in linear if "layers.1.mlp" not in name}
    for name in linear:
        values = parameters[name]
        assert np.array_equal(checkpoint.read(name), torch_to_bf16(values)), name
        if name not in checkpoint.formats:
            continue
        found = find_format(checkpoint.formats[name])
        for _ in range(4):
            rows, cols = (sorted(int(at) for at in rng.choice(size + 1, 2, False)) for size in values.shape)
            first, last = found.whole_groups(*cols, values.shape[1])
            block = checkpoint.read_quantized(name, slice(*rows), slice(first, last))
            order = checkpoint.read_order(name)[first:last] if found.is_ordered else np.arange(first, last)
            assert np.array_equal(found.values(block), values[slice(*rows)].numpy()[:, order]), (name, rows, cols)
            got = checkpoint.read(name, slice(*rows), slice(*cols))
            assert np.array_equal(got, torch_to_bf16(values[slice(*rows), slice(*cols)]))


LAYER = "model.layers.0.mlp.down_proj"
Edit = Callable[[dict[str, Tensor]], object]


def replaced(suffix: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{suffix}"] = change(tensors[f"{LAYER}.{suffix}"]).contiguous()

    return edit


def without(suffix: str) -> Edit:
    return lambda tensors: tensors.pop(f"{LAYER}.{suffix}")


def with_infinity(scales: Tensor) -> Tensor:
    scales.view(-1)[3] = torch.inf
    return scales


BAD_TENSORS: list[tuple[str, Edit, str]] = [
    ("fp8 blocks", without("weight_scale_inv"), f"tensor {LAYER}.weight_scale_inv is missing"),
    (
        "fp8 blocks",
        replaced("weight_scale_inv", lambda scales: scales[:1]),
        rf"{LAYER}.weight_scale_inv has shape \[1, 3\]; \[2, 3\] was expected",
    ),
    ("fp8 blocks", replaced("weight_scale_inv", with_infinity), f"{LAYER}.weight_scale_inv has scales that are NaN or"),
    (
        "fp8 channels",
        replaced("weight_scale", lambda scales: scales[:7]),
        r"weight_scale has shape \[7, 1\]; one scale",
    ),
    ("w4a16", without("weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("w4a16", replaced("weight_scale", with_infinity), f"{LAYER}.weight_scale has scales that are NaN or"),
    ("awq", without("qzeros"), f"{LAYER}.qzeros is missing"),
    ("awq", replaced("scales", lambda scales: scales[:3]), r"scales has shape \[3, 192\]; \[10, 192\] was expected"),
    ("awq", replaced("scales", lambda scales: scales.int()), "scales has dtype I32"),
    ("gptq", replaced("g_idx", lambda order: order + 1), r"g_idx has groups from 1 to 5; 0 to 4 were expected"),
    ("gptq", replaced("g_idx", lambda order: order.clamp(max=3)), "does not have 64 columns in every group"),
    ("gptq", replaced("g_idx", lambda order: order[:9]), r"g_idx has shape \[9\]"),
]


@pytest.mark.parametrize(("kind", "edit", "says"), BAD_TENSORS, ids=lambda part: part if isinstance(part, str) else "")
def test_bad_tensors(kind: str, edit: Edit, says: str, tmp_path: Path) -> None:
    save_quantized(tiny.make("qwen3", 1, **SIZES), tmp_path, KINDS[kind])
    edit_tensors(tmp_path, edit)
    with pytest.raises(ModelError, match=says) as caught:
        checkpoint = open_checkpoint(tmp_path)
        for name in checkpoint.formats:
            checkpoint.read(name)
    assert "\n" not in str(caught.value)


def changed(kind: str, *path: str, to: Any) -> dict[str, Any]:
    """A kind's config with another value."""
    import copy

    config = copy.deepcopy(KINDS[kind].config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
BAD_SCHEMES: list[tuple[dict[str, Any] | list[int], str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "quantized with bitsandbytes are not supported; supported are fp8",
    ),
    ({}, "has dtype I32; supported are F32, .*no quantization_config"),
    ([1], "quantization_config is"),
    ({"bits": 4}, "quantized with unknown"),
    (changed("fp8 blocks", "fmt", to="e5m2"), "fmt 'e5m2'"),
    (changed("fp8 blocks", "weight_block_size", to=[64, 64]), r"weight_block_size \[64, 64\]"),
    (changed("awq", "bits", to=8), "bits 8"),
    (changed("awq", "bits", to=True), "bits True"),
    (changed("awq", "version", to="gemv"), "version 'gemv'"),
    (changed("awq", "group_size", to=48), "group_size 48, no multiple of 32"),
    (changed("gptq", "dynamic", to={"-:lm_head": {}}), "dynamic"),
    (changed("w4a16", "format", to="marlin-24"), "format 'marlin-24'"),
    (changed("w4a16", *WEIGHTS, "num_bits", to=8), "num_bits 8"),
    (changed("w4a16", *WEIGHTS, to=None), "weights None"),
    (changed("fp8 channels", *WEIGHTS, "strategy", to="token"), "strategy 'token'"),
    (changed("gptq", "group_size", to=128), "320 inputs, no whole number of groups of 128|192 inputs"),
]


@pytest.mark.parametrize(("config", "says"), BAD_SCHEMES, ids=lambda part: part if isinstance(part, str) else "")
def test_bad_schemes(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    kind = "gptq" if config and isinstance(config, dict) and config.get("quant_method") == "gptq" else "awq"
    save_quantized(tiny.make("qwen3", 1, **SIZES), tmp_path, KINDS[kind])
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelError, match=says) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_fp8_without_a_config(tmp_path: Path) -> None:
    save_quantized(tiny.make("qwen3", 1, **SIZES), tmp_path, KINDS["fp8 blocks"])
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelError, match=r"has dtype F8_E4M3; supported are .* config.json has no quantization_config"):
        open_checkpoint(tmp_path)
