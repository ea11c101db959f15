"""How the files of a Hugging Face folder are quantized: `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distmk.errors import ModelError, shown

BLOCK = 128
SUPPORTED = (
    "fp8 (E4M3, blocks of 128 x 128 or a scale per tensor), compressed-tensors (float-quantized: 8-bit floats; "
    "pack-quantized: 4-bit integers), awq (4 bits, gemm) and gptq (4 bits)"
)


@dataclass(frozen=True)
class Quantization:
    """The quantization of linear layers' weights. Layers whose tensors are plain floats are not quantized.

    method: its name in config.json, which is vLLM's.
    bits: 8 for FP8 E4M3, 4 for integers.
    group: columns that share a scale; None: all, or as the shape of the scales says.
    rows: rows that share a scale, in blocks of `group` columns.
    zero_shift: is added to stored zero points (1 in GPTQ's first format, which stores one less).
    """

    method: str
    bits: int
    group: int | None = None
    rows: int = 1
    zero_shift: int = 0


class _Fields:
    """The values of a `quantization_config`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def expect(self, key: str, *allowed: object) -> Any:
        """The value of `key`; an absent one is None. ModelError: it is not one of `allowed`."""
        value = self.values.get(key)
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.refused(f"{key} {shown(value)}")
        return value

    def sub(self, key: str) -> _Fields:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.refused(f"{key} {shown(value)}")
        return _Fields(value, self.where)

    def group(self, key: str = "group_size") -> int | None:
        """Columns that share a scale; None for all (-1). ModelError: it is no multiple of 32."""
        value = self.values.get(key)
        if value in (None, -1):
            return None
        if not isinstance(value, int) or value < 1 or value % 32:
            raise self.refused(f"{key} {shown(value)}, no multiple of 32")
        return value

    def refused(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: weights quantized with {what} are not supported; supported are {SUPPORTED}")


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """The quantization that a config.json declares; None: none. ModelError, naming `where`: it is not supported."""
    values = config.get("quantization_config")
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ModelError(f"{where}: quantization_config is {shown(values)}; an object was expected")
    method = values.get("quant_method", "unknown")
    read = _READERS.get(method) if isinstance(method, str) else None
    fields = _Fields(values, where)
    if read is None:
        raise fields.refused(shown(method) if not isinstance(method, str) else method)
    return read(fields)


def _read_fp8(f: _Fields) -> Quantization:
    f.expect("fmt", None, "e4m3")
    if f.values.get("weight_block_size") is None:
        return Quantization("fp8", 8)
    f.expect("weight_block_size", [BLOCK, BLOCK])
    return Quantization("fp8", 8, BLOCK, BLOCK)


def _read_awq(f: _Fields) -> Quantization:
    f.expect("bits", 4)
    f.expect("version", None, "gemm", "GEMM")
    f.expect("zero_point", None, True)
    return Quantization("awq", 4, f.group())


def _read_gptq(f: _Fields) -> Quantization:
    f.expect("bits", 4)
    f.expect("dynamic", None, {})
    kind = f.expect("checkpoint_format", None, "", "gptq", "gptq_v2")
    return Quantization("gptq", 4, f.group(), zero_shift=0 if kind == "gptq_v2" else 1)


def _read_compressed(f: _Fields) -> Quantization:
    """Schemes of several groups of layers must be alike."""
    if (sparsity := f.values.get("sparsity_config")) and f.sub("sparsity_config").values.get("format") != "dense":
        raise f.refused(f"sparsity_config {shown(sparsity)}")
    kind = f.expect("format", "float-quantized", "pack-quantized")
    groups = f.sub("config_groups")
    found = {_read_group(groups.sub(name), kind) for name in groups.values}
    if len(found) != 1:
        raise f.refused(f"{len(found)} different config_groups")
    return found.pop()


def _read_group(group: _Fields, kind: str) -> Quantization:
    if group.values.get("format") not in (None, kind):
        raise group.refused(f"a config group of format {shown(group.values['format'])}")
    weights = group.sub("weights")
    if kind == "float-quantized":
        weights.expect("num_bits", 8)
        weights.expect("type", "float")
        if weights.expect("strategy", "tensor", "channel", "block") == "block":
            weights.expect("block_structure", [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
            return Quantization("compressed-tensors", 8, BLOCK, BLOCK)
        return Quantization("compressed-tensors", 8)
    weights.expect("num_bits", 4)
    weights.expect("type", None, "int")
    strategy = weights.expect("strategy", None, "group", "channel")
    return Quantization("compressed-tensors", 4, None if strategy == "channel" else weights.group())


_READERS = {"fp8": _read_fp8, "awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed}
