"""The quantized matrices among the tensors of safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distmk.errors import ModelError
from distmk.weights.files import PLAIN_ENCODINGS, DataFile, StoredTensor
from distmk.weights.fp8_tensors import find_fp8
from distmk.weights.int4_tensors import find_int4
from distmk.weights.quantization_config import Quantization
from distmk.weights.quantized_tensor import QuantizedTensor

WEIGHT = ".weight"
KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_UNUSED = (".input_scale", ".weight_shape", *KV_SCALES)
"""Suffixes of tensors beside quantized ones that change nothing here: activations and the KV cache stay bfloat16."""

Find = Callable[[str, Mapping[str, StoredTensor], Quantization, Sequence[DataFile]], "QuantizedTensor | None"]
_FINDERS: Mapping[int, Find] = {8: find_fp8, 4: find_int4}


def find_quantized(
    names: Iterable[str], tensors: dict[str, StoredTensor], scheme: Quantization | None, files: Sequence[DataFile]
) -> dict[str, QuantizedTensor]:
    """The matrices of `names` that are quantized. The tensors that they are made of are taken out of `tensors`.

    ModelError: scales are missing or misshapen, or a tensor has a type that is not supported.
    """
    found: dict[str, QuantizedTensor] = {}
    for name in names if scheme else ():
        if name.endswith(WEIGHT) and scheme:
            matrix = _FINDERS[scheme.bits](name.removesuffix(WEIGHT), tensors, scheme, files)
            if matrix:
                found[name] = matrix
    for matrix in found.values():
        for part in matrix.parts:
            tensors.pop(part, None)
    if scheme:
        for name in [name for name in tensors if name.endswith(_UNUSED)]:
            del tensors[name]
    for name, tensor in tensors.items():
        if tensor.encoding.name not in PLAIN_ENCODINGS:
            hint = "; config.json has no quantization_config, which says how codes are scaled" * (not scheme)
            raise ModelError(
                f"{files[tensor.file].path}: tensor {name} has dtype {tensor.encoding.name}; supported are "
                f"{', '.join(PLAIN_ENCODINGS)}{hint}"
            )
    return found
