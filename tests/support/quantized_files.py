"""Hugging Face folders with quantized linear layers, written as their tools write them, and what their weights are.

The references are torch's own FP8 type, and codes, scales and zero points from before they are packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 203,
}
"""Widths that blocks of 128 columns do not divide, and shards of two ranks that begin inside of a block."""


class Matrix(NamedTuple):
    """The tensors of a linear layer by their suffixes, and its values in float32."""

    tensors: Mapping[str, Tensor]
    values: Tensor


Quantize = Callable[[Tensor], Matrix]


def fp8_block(weight: Tensor) -> Matrix:
    """Scales of 128 x 128 blocks, as `weight_scale_inv` of DeepSeek-V3 and Qwen3-*-FP8."""
    rows, cols = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
    padded[:rows, :cols] = weight
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    by_element = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    codes = (weight / by_element).to(torch.float8_e4m3fn)
    return Matrix({"weight": codes, "weight_scale_inv": scales}, codes.float() * by_element)


def fp8_channel(weight: Tensor) -> Matrix:
    """compressed-tensors' strategy "channel", scales in bf16."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Matrix({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())


def fp8_tensor(weight: Tensor) -> Matrix:
    """compressed-tensors' strategy "tensor", with a scale of activations, too."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}
    return Matrix(tensors, codes.float() * scale)


def grouped(weight: Tensor, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [rows, cols], scales in float16 and zero points [rows, groups], and the values, of rounding to nearest."""
    rows, cols = weight.shape
    parts = weight.reshape(rows, -1, group)
    if zeros:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-5).half()
        zero_points = (-low / scales.float()).round().clamp(1, 15).to(torch.int32)
    else:
        scales = (parts.abs().amax(2) / 7).clamp(min=1e-5).half()
        zero_points = torch.full(scales.shape, 8, dtype=torch.int32)
    by_code = scales.float()[:, :, None]
    codes = ((parts / by_code).round() + zero_points[:, :, None]).clamp(0, 15).to(torch.int32)
    values = (codes - zero_points[:, :, None]).float() * by_code
    return codes.reshape(rows, cols), scales, zero_points, values.reshape(rows, cols)


def pack(codes: Tensor, axis: int, order: Sequence[int] = range(8)) -> Tensor:
    """int32 words of eight codes along `axis`; half byte i has code order[i]. Missing codes are zero."""
    moved = codes.movedim(axis, -1)
    padded = torch.zeros(*moved.shape[:-1], -(-moved.shape[-1] // 8) * 8, dtype=torch.int64)
    padded[..., : moved.shape[-1]] = moved
    groups = padded.reshape(*padded.shape[:-1], -1, 8)
    words = sum(groups[..., code] << 4 * place for place, code in enumerate(order))
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).movedim(-1, axis).contiguous()


def int4_packed(group: int, zeros: bool) -> Quantize:
    """compressed-tensors' pack-quantized."""

    def quantize(weight: Tensor) -> Matrix:
        codes, scales, zero_points, values = grouped(weight, group or weight.shape[1], zeros)
        shape = torch.tensor(weight.shape)
        tensors = {"weight_packed": pack(codes, 1), "weight_scale": scales, "weight_shape": shape}
        return Matrix(tensors | ({"weight_zero_point": pack(zero_points, 0)} if zeros else {}), values)

    return quantize


def awq(group: int) -> Quantize:
    """AutoAWQ's `WQLinear_GEMM`, whose words have columns 0, 2, 4, 6, 1, 3, 5, 7."""

    def quantize(weight: Tensor) -> Matrix:
        codes, scales, zero_points, values = grouped(weight, group, True)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": pack(codes.T, 1, order), "qzeros": pack(zero_points.T, 1, order), "scales": scales.T}
        return Matrix(tensors, values)

    return quantize


def gptq(group: int, zeros: bool, stored_less: int = 1, orders: Mapping[int, Tensor] | None = None) -> Quantize:
    """AutoGPTQ's `QuantLinear`; zero points are stored less one.

    orders: with act-order, the columns by number of columns; groups are made of columns that follow each other there.
    """

    def quantize(weight: Tensor) -> Matrix:
        num_cols = weight.shape[1]
        order = torch.arange(num_cols) if orders is None else orders[num_cols]
        back = torch.argsort(order)
        codes, scales, zero_points, values = grouped(weight[:, order].contiguous(), group, zeros)
        codes, values = codes[:, back], values[:, back]
        tensors = {
            "qweight": pack(codes.T, 0),
            "qzeros": pack(zero_points.T - stored_less, 1),
            "scales": scales.T,
            "g_idx": (back // group).to(torch.int32),
        }
        return Matrix(tensors, values)

    return quantize


def compressed(weights: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


class Kind(NamedTuple):
    """A kind of file: `quantization_config`, how a layer is quantized, and the weight format that it has in memory."""

    config: dict[str, Any]
    quantize: Quantize
    format: str


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
ORDERS = {cols: torch.randperm(cols, generator=torch.Generator().manual_seed(cols)) for cols in (192, 320)}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "desc_act": False, "checkpoint_format": "gptq"}
KINDS: dict[str, Kind] = {
    "fp8 blocks": Kind(FP8, fp8_block, "fp8_block"),
    "fp8 channels": Kind(compressed(FLOAT8 | {"strategy": "channel"}, "float-quantized"), fp8_channel, "fp8"),
    "fp8 tensors": Kind(compressed(FLOAT8 | {"strategy": "tensor"}, "float-quantized"), fp8_tensor, "fp8"),
    "w4a16": Kind(compressed(INT4 | {"group_size": 64}, "pack-quantized"), int4_packed(64, False), "int4_g32"),
    "w4a16 with zeros": Kind(
        compressed(INT4 | {"group_size": 32, "symmetric": False}, "pack-quantized"), int4_packed(32, True), "int4_g32"
    ),
    "w4a16 channels": Kind(
        compressed(INT4 | {"strategy": "channel", "group_size": None}, "pack-quantized"), int4_packed(0, False), "int4"
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32), "int4_g32"
    ),
    "gptq": Kind(GPTQ | {"group_size": 64, "sym": True}, gptq(64, False), "int4_g32"),
    "gptq with zeros": Kind(
        GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(32, True, 0), "int4_g32"
    ),
    "gptq act-order": Kind(GPTQ | {"group_size": 32, "desc_act": True}, gptq(32, True, 1, ORDERS), "int4_g32_ordered"),
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def save_quantized(
    model: PreTrainedModel, folder: Path, kind: Kind, skip: Callable[[str], bool] = lambda name: False
) -> None:
    """Write `model` as `kind`, and give it the values of the quantized weights, in float32. skip: matrices left in bf16."""
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if is_linear(name) and not skip(name)]:
        made = kind.quantize(tensors.pop(name).float())
        base = name.removesuffix("weight")
        tensors |= {base + suffix: tensor.contiguous() for suffix, tensor in made.tensors.items()}
        parameters[name].data = made.values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=kind.config)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().numpy()
