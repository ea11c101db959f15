"""Rotary embedding: its base and scaling as a config.json stores them, and the frequencies that follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distmk.errors import ModelError, UsageError
from distmk.model.json_fields import Fields
from distmk.model.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    context_length,
    read_scaling,
)

if TYPE_CHECKING:
    from distmk.model.config import ModelConfig


Array = npt.NDArray[np.float32]
Range = tuple[int, int]

ROPE, LOCAL_ROPE, NO_ROPE = "rope", "local_rope", "no_rope"
"""Rotary tables: with the config's base and scaling; with the base of layers with a window, unscaled; and one that
rotates nothing.
"""


def read_rope(f: Fields, default_max_position: int) -> tuple[float, RopeScaling | None, int]:
    """The rotary base, the scaling, and the longest context in tokens."""
    old_theta, rope = f.number("rope_theta", 10000.0), _rope_fields(f)
    for key, value in rope.values.items():
        if isinstance(value, Mapping):  # parameters for each type of layer
            raise ModelError(f"{rope.where}: {key} is an object; one set of parameters for all layers was expected")
    for where in (f, rope):
        if where.values.get("rope_theta", 1.0) is None:
            raise ModelError(f"{where.where}: rope_theta is null; a number was expected")
    theta = rope.number("rope_theta", old_theta)
    max_position = f.integer("max_position_embeddings", default_max_position)
    scaling = read_scaling(f, rope, max_position)
    return theta, scaling, context_length(scaling, max_position)


def read_partial_rotary_dim(f: Fields, head_dim: int, may_be_partial: bool) -> int | None:
    """The number of elements of a head that rotate; None: all. ModelError: only some rotate, and not `may_be_partial`."""
    factor = _rope_fields(f).number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if factor == 1.0:
        return None
    if not may_be_partial:
        raise ModelError(f"{f.where}: partial_rotary_factor {factor:g} is not supported; only 1 is")
    if not 0 < factor < 1:
        raise ModelError(f"{f.where}: partial_rotary_factor is {factor:g}; it must be positive, up to 1")
    return int(head_dim * factor)


def _rope_fields(f: Fields) -> Fields:
    """The rotary parameters. As in transformers, a filled `rope_scaling` replaces all of `rope_parameters`."""
    old = f.sub("rope_scaling")
    return old if old.values else f.sub("rope_parameters")


def check_rope(config: ModelConfig, where: str) -> None:
    """ModelError, naming `where`: the rotated elements, the scaling, the head size and the base do not fit each other."""
    dim, scaling, factors = config.rotary_dim, config.rope_scaling, config.rope_freq_factors
    half, heads = dim // 2, f"head_dim {config.head_dim}"
    if config.partial_rotary_dim is not None:
        heads += f", of which {dim} elements rotate,"
    if dim % 2 or not 2 <= dim <= config.head_dim:
        raise ModelError(
            f"{where}: {dim} elements of a head_dim of {config.head_dim} rotate; an even number was expected"
        )
    if factors is not None and (len(factors) != half or not all(1e-6 <= factor <= 1e6 for factor in factors)):
        raise ModelError(f"{where}: {len(factors)} rotary frequency factors; {heads} needs {half} positive ones")
    if isinstance(scaling, LongRopeScaling):
        for name, given in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(given) != half:
                raise ModelError(f"{where}: {name} has {len(given)} numbers; {heads} needs {half} of them")
    if isinstance(scaling, DynamicScaling) and half < 2:
        raise ModelError(f"{where}: RoPE type 'dynamic' needs at least 4 elements of a head that rotate, not {dim}")
    if isinstance(scaling, YarnScaling) and config.rope_theta <= 1.0:
        raise ModelError(f"{where}: rope_theta is {config.rope_theta:g}; RoPE type 'yarn' needs more than 1")


def attention_factor(config: ModelConfig) -> float:
    """The factor of the cosines and sines of every position."""
    scaling = config.rope_scaling
    return scaling.attention_factor if isinstance(scaling, (YarnScaling, LongRopeScaling)) else 1.0


def rotation_order(config: ModelConfig) -> tuple[Range, ...]:
    """The order in which tasks store the elements of a query or key head, as ranges of the checkpoint's order.

    A checkpoint's pairs are (i, i + rotary_dim / 2), followed by the elements that do not rotate. Tasks rotate pairs
    (i, i + head_dim / 2), so the elements that do not rotate become the last pairs, and the table leaves these
    unchanged. Scores do not depend on the order.
    """
    dim, half = config.rotary_dim, config.head_dim // 2
    if dim == config.head_dim:
        return ((0, dim),)
    middle = dim + half - dim // 2
    return ((0, dim // 2), (dim, middle), (dim // 2, dim), (middle, config.head_dim))


def rope_table(config: ModelConfig, num_positions: int, table: str = ROPE) -> Array:
    """float32 [num_positions, head_dim]: cosines, then sines, of every position's angles (RoPE, arXiv:2104.09864).

    The values include the attention factor of YaRN or LongRoPE. Pairs that do not rotate (`rotation_order`) have 1 and
    0. `num_positions`: the length of the longest sequence of the run. UsageError: there is no table of that name.
    """
    half, num_pairs = config.head_dim // 2, config.rotary_dim // 2
    values = np.repeat(np.array([[1.0, 0.0]], np.float32), half, axis=1).repeat(num_positions, axis=0)
    if table == NO_ROPE:
        return values
    if table == LOCAL_ROPE and config.local_rope_theta:
        config = dataclasses.replace(
            config, rope_theta=config.local_rope_theta, rope_scaling=None, rope_freq_factors=None
        )
    elif table != ROPE:
        raise UsageError(
            f"the config has no rotary table {table!r}; tables are {ROPE}, {LOCAL_ROPE} (local_rope_theta), {NO_ROPE}"
        )
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq(config, num_positions)[None, :]
    factor = np.float32(attention_factor(config))
    values[:, :num_pairs], values[:, half : half + num_pairs] = np.cos(angles) * factor, np.sin(angles) * factor
    return values


def inv_freq(config: ModelConfig, num_positions: int = 0) -> Array:
    """The rotary frequencies in radians per position, float32 [rotary_dim / 2], for contexts of up to `num_positions`.

    Plain: theta ** (-2i / rotary_dim), from Su et al., "RoFormer" (arXiv 2104.09864), section 3.2. Scaled: as
    transformers' `ROPE_INIT_FUNCTIONS` compute it. Dynamic NTK and LongRoPE depend on `num_positions` and hold for all
    positions of a run, because keys in a KV cache cannot be rotated again when a sequence grows. Intermediate results
    are rounded to float32 at the same places as in that code, because the rounding of a frequency is visible at
    position 100,000.
    """
    scaling = config.rope_scaling
    power = _powers(config.rotary_dim, _base(config, num_positions))
    freq: Array = np.float32(1) / power
    if config.rope_freq_factors is not None:
        freq /= np.asarray(config.rope_freq_factors, np.float32)
    if isinstance(scaling, LinearScaling):
        freq /= np.float32(scaling.factor)
    elif isinstance(scaling, YarnScaling):
        return _yarn(config, scaling, freq)
    elif isinstance(scaling, LongRopeScaling):
        is_long = num_positions > scaling.original_max_position
        factors = np.asarray(scaling.long_factor if is_long else scaling.short_factor, np.float32)
        return np.asarray(np.float32(1) / (factors * power), np.float32)
    elif isinstance(scaling, Llama3Scaling):
        return _llama3(scaling, freq)
    return freq


def _base(config: ModelConfig, num_positions: int) -> float:
    """theta; dynamic NTK raises it for a context longer than that of pretraining."""
    scaling = config.rope_scaling
    if not isinstance(scaling, DynamicScaling):
        return config.rope_theta
    longer = max(num_positions, scaling.original_max_position) / scaling.original_max_position
    exponent = config.rotary_dim / (config.rotary_dim - 2)
    return float(config.rope_theta * ((scaling.factor * longer) - (scaling.factor - 1)) ** exponent)


def _powers(rotary_dim: int, base: float) -> Array:
    """base ** (2i / rotary_dim). Float32 powers differ between machines, so they are rounded from float64."""
    exponents = np.arange(0, rotary_dim, 2).astype(np.float32) / np.float32(rotary_dim)
    return np.asarray(np.power(np.float32(base), exponents, dtype=np.float64), np.float32)


def _yarn(config: ModelConfig, scaling: YarnScaling, freq: Array) -> Array:
    """YaRN, section 3.2: `_compute_yarn_parameters` of transformers."""

    def dimension(rotations: float) -> float:
        """The dimension, of rotary_dim / 2, whose pair makes `rotations` rotations in `original_max_position` positions."""
        positions = scaling.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(positions) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    high += 0.001 if low == high else 0
    ramp = (np.arange(config.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = freq / np.float32(scaling.factor)
    return np.asarray(stretched * (np.float32(1) - kept) + freq * kept, np.float32)


def _llama3(scaling: Llama3Scaling, freq: Array) -> Array:
    """Llama 3.1, `apply_scaling` in meta-llama/llama-models `models/llama3/model.py`."""
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    context, factor = np.float32(scaling.original_max_position), np.float32(scaling.factor)
    # torch divides by a tensor in two roundings: it multiplies by the reciprocal.
    wavelength: Array = np.float32(2 * math.pi) * (np.float32(1) / freq)
    blend = (context * (np.float32(1) / wavelength) - low) / (high - low)
    blended = (np.float32(1) - blend) * freq / factor + blend * freq
    stretched = np.where(wavelength > context / low, freq / factor, blended)
    scaled: Array = np.where(wavelength < context / high, freq, stretched)
    return scaled
