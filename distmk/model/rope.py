"""Rotary embedding: its base and scaling as a config.json has them, and the frequencies that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError
from distmk.model.json_fields import Fields

if TYPE_CHECKING:
    from distmk.model.config import ModelConfig


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary wavelengths ("llama3" in Hugging Face's `rope_type`).

    Wavelengths, in positions, above `original_max_position / low_freq_factor` grow by `factor`, those below
    `original_max_position / high_freq_factor` stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def read_rope(f: Fields, default_max_position: int) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling. As in transformers, a filled `rope_scaling` counts instead of all of `rope_parameters`."""
    old_theta = f.number("rope_theta", 10000.0)
    old = f.sub("rope_scaling")
    rope = old if old.values else f.sub("rope_parameters")
    for key, value in rope.values.items():
        if isinstance(value, Mapping):  # of each type of layers
            raise ModelError(f"{rope.where}: {key} is an object; one set of parameters for all layers was expected")
    for where in (f, rope):
        if where.values.get("rope_theta", 1.0) is None:
            raise ModelError(f"{where.where}: rope_theta is null; a number was expected")
    theta = rope.number("rope_theta", old_theta)
    partial = rope.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{f.where}: partial_rotary_factor {partial:g} is not supported; only 1 is")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default" or (kind == "linear" and rope.number("factor") == 1.0):
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{f.where}: RoPE type {kind!r} is not supported; supported are 'default' and 'llama3'")
    # transformers takes a number beside `rope_scaling` before that inside it.
    inside = rope.integer(
        "original_max_position_embeddings", f.integer("max_position_embeddings", default_max_position)
    )
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=f.integer("original_max_position_embeddings", inside),
    )
    numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    if not all(1e-6 <= number <= 1e6 for number in numbers) or not 1 <= scaling.original_max_position < 1 << 31:
        raise ModelError(
            f"{rope.where}: factor, low_freq_factor and original_max_position_embeddings must be positive, "
            "and below a million, or 2**31 positions"
        )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(
            f"{rope.where}: high_freq_factor {scaling.high_freq_factor:g} must be above "
            f"low_freq_factor {scaling.low_freq_factor:g}"
        )
    return theta, scaling


def inv_freq(config: ModelConfig) -> npt.NDArray[np.float32]:
    """The rotary frequencies in radians per position, float32 [head_dim / 2].

    Plain: theta ** (-2i / head_dim), from Su et al., "RoFormer" (arXiv 2104.09864), section 3.2. Scaled: Llama 3.1,
    `apply_scaling` in meta-llama/llama-models `models/llama3/model.py`, which transformers has as
    `_compute_llama3_parameters`. Intermediate results are rounded to float32 where that code rounds them, as the rounding of
    a frequency is visible at position 100,000. Float32 powers differ between machines, so they are rounded from float64.
    """
    exponents = np.arange(0, config.head_dim, 2).astype(np.float32) / np.float32(config.head_dim)
    power = np.power(np.float32(config.rope_theta), exponents, dtype=np.float64).astype(np.float32)
    freq: npt.NDArray[np.float32] = np.float32(1) / power
    if config.rope_freq_factors is not None:
        freq /= np.asarray(config.rope_freq_factors, np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    context, factor = np.float32(scaling.original_max_position), np.float32(scaling.factor)
    # torch divides by a tensor in two roundings: it multiplies by the reciprocal.
    wavelength: npt.NDArray[np.float32] = np.float32(2 * math.pi) * (np.float32(1) / freq)
    blend = (context * (np.float32(1) / wavelength) - low) / (high - low)
    blended = (np.float32(1) - blend) * freq / factor + blend * freq
    stretched = np.where(wavelength > context / low, freq / factor, blended)
    scaled: npt.NDArray[np.float32] = np.where(wavelength < context / high, freq, stretched)
    return scaled
